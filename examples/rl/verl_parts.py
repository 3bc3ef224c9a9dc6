"""verl's own classes as `verl_grpo` uses them: subclasses for a CPU, and the checks in each step.

verl creates them in processes that Ray starts. Each step adds a JSON line to the file `EVENTS`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

EVENTS = "PENSTOCK_EXAMPLE_EVENTS"
"""Environment variable with the path of the file of events."""


def say(**facts: Any) -> None:
    """Append a line to the file of events with one write."""
    with Path(os.environ[EVENTS]).open("a") as file:
        file.write(json.dumps(facts | {"time": time.time()}) + "\n")


class Rank(DetachActorWorker):
    """verl's worker for one trainer rank, which also scores tokens and can send weights in verl's own way."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # verl would name the CPU twice, as the host and as the accelerator, which torch refuses.
        initialize_global_process_group_ray(backend="cpu:gloo")
        self._adapter: ServerAdapter | None = None
        say(event="rank", rank=self.rank, pid=os.getpid())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score(self, tokens: torch.Tensor, num_new: int) -> tuple[torch.Tensor, float]:
        """Return the log-probabilities of the last tokens of each row, and the largest logit. Collective."""
        module = self.actor.engine.module
        with torch.no_grad():
            logits = module(input_ids=tokens).logits[:, -num_new - 1 : -1].float()
        scores = logits.log_softmax(-1).gather(2, tokens[:, -num_new:, None])[..., 0]
        return scores, float(logits.abs().max())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def send_naive(self, global_steps: int) -> None:
        """Send the weights like verl's backend `naive`: gathered, and then through shared memory to this host's server.

        verl 0.9.1 offers `naive` only to a trainer rank with its own server. Here the first rank sends to the only
        server, and the other ranks take part in the gathering.
        """
        tensors, _ = self.actor.engine.get_per_tensor_param()
        if self.rank == 0:
            if self._adapter is None:
                self._adapter = ServerAdapter(self.config.rollout, self.config.model, None, replica_rank=0)
            await self._adapter.update_weights(tensors, global_steps=global_steps)
        else:
            for _ in tensors:
                pass


class Server(vLLMHttpServer):
    """verl's server, with the current vLLM's way to pause. It also reports its process id."""

    def _get_worker_extension_cls(self) -> str:
        return "verl_extension.Extension"

    async def launch_server(self, **arguments: Any) -> None:
        await super().launch_server(**arguments)
        # verl 0.9.1 pauses vLLM with an argument that vLLM 0.32 no longer has.
        pause = self.engine.pause_generation

        async def pause_generation(wait_for_inflight_requests: bool, clear_cache: bool) -> None:
            await pause(mode="wait" if wait_for_inflight_requests else "abort", clear_cache=clear_cache)

        self.engine.pause_generation = pause_generation
        say(event="engine", pid=os.getpid())


class Replica(vLLMReplica):
    """verl's replica with the server above."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server_class = ray.remote(Server)


class Sampler(ReplayBufferAsync):
    """verl's buffer of samples. It checks for samples every 20 ms instead of 2 s, and raises if the server fails."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, poll_interval=0.02)

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        # verl would keep submitting other prompts to the dead server.
        if self.failure_keys[partition_id]:
            number = len(self.failure_keys[partition_id])
            raise RuntimeError(f"the server gave no samples of {number} prompts; see the errors above in verl's log")
        return super()._terminal_eviction_reasons(global_steps, partition_id)


@register_trainer("penstock_example")
class Trainer(PPOTrainerSeparateAsync):
    """verl's trainer with a separate rollout, which compares the samples of each step with its weights."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(Rank)

    def on_init_end(self) -> None:
        super().on_init_end()
        say(event="started", step=self.global_steps, ranks=self.actor_rollout_wg.world_size)

    def on_step_begin(self) -> None:
        self._began = time.perf_counter()
        super().on_step_begin()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        fields = ["input_ids", "rollout_log_probs", "old_log_probs", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        # All samples have the same length.
        self._tokens, served, own, rewards = (
            torch.stack(list(data[name])) for name in ("input_ids", "rollout_log_probs", "old_log_probs", "rm_scores")
        )
        self._num_new = served.shape[1]
        self._scores, largest = self.actor_rollout_wg.score(self._tokens, self._num_new)[0]
        # A logit is a sum of `hidden_size` products, which the two sides add in different orders. See torchrun_grpo.
        hidden_size = self.hidden_size()
        self._facts = {
            "reward": float(rewards.sum(1).mean()),
            "difference": float((served - self._scores).abs().max()),
            "verl_difference": float((own - self._scores).abs().max()),
            "bound": 2 * hidden_size * torch.finfo(torch.float32).eps * largest,
            "versions": sorted({tag[name] for tag in batch.tags for name in ("min_global_steps", "max_global_steps")}),
        }
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)
        after, _ = self.actor_rollout_wg.score(self._tokens, self._num_new)[0]
        self._facts["moved"] = float((after - self._scores).abs().max())
        return batch

    def hidden_size(self) -> int:
        config = json.loads((Path(self.config.actor_rollout_ref.model.path) / "config.json").read_text())
        return int(config["hidden_size"])

    def on_step_end(self) -> None:
        transfer = self.config.penstock_example.transfer
        way = ("penstock", "naive")[self.global_steps % 2] if transfer == "alternate" else transfer
        began = time.perf_counter()
        if way == "penstock":
            super().on_step_end()
        else:
            # These are the steps of verl's CheckpointEngineManager, which refuses `naive` for a separate trainer.
            manager = self.standalone_checkpoint_manager
            manager.abort_replicas()
            self.actor_rollout_wg.send_naive(self.global_steps)
            manager.resume_generation_replicas()
        now = time.perf_counter()
        sync = getattr(self, "_pending_sync_metrics", None) or {}
        say(
            step=self.global_steps,
            way=way,
            # verl's manager pauses the server first, and lets it continue at the end.
            pause_s=now - began,
            step_s=now - self._began,
            sample_s=self.timing_raw["gen"],
            train_s=self.timing_raw["update_actor"],
            save_s=self.timing_raw.get("save_checkpoint", 0.0),
            version=sync.get("penstock/version"),
            publish_s=sync.get("penstock/publish_s"),
            is_sharded=sync.get("penstock/sharded"),
            **self._facts,
        )


class TaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc]
    """verl's runner with the replica and the trainer above."""

    def run(self, config: Any) -> None:
        RolloutReplicaRegistry.register("vllm", lambda: Replica)
        super().run(config)
