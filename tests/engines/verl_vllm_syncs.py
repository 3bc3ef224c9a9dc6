"""verl's trainer sends versions to verl's vLLM server, whose workers receive them by themselves.

    python verl_vllm_syncs.py MODEL

For each version, this prints the largest difference between the log-probabilities of the server's answer and those of
the trainer's model.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import torch
import verl_syncs
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

PROMPT = [1, 9, 12, 3]


class Server(vLLMHttpServer):
    """verl's server. verl 0.9.1 pauses it with an argument that vLLM 0.32 no longer has."""

    async def abort_all_requests(self, **_: Any) -> None:
        await self.engine.pause_generation(mode="abort")


class Trainer(verl_syncs.Trainer):
    """A trainer that scores an answer."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_probs(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return the model's log-probabilities of an answer. Collective."""
        with torch.no_grad():
            logits = self.actor.engine.module(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def main() -> None:
    """Send three versions."""
    (model,) = sys.argv[1:]
    names = ("PENSTOCK_RUNTIME_DIR", "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_DEVICE", "PYTHONPATH", "HF_HUB_OFFLINE")
    names += ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CACHE_ROOT", "VLLM_HOST_IP")
    environ = {name: os.environ[name] for name in names if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"env_vars": environ})
    config = verl_syncs.configuration(model, {}, {"receive": "engine", "stall_s": 20})
    rollout = config.rollout
    rollout.free_cache_engine = rollout.enable_sleep_mode = False
    rollout.enforce_eager, rollout.dtype, rollout.load_format = True, "float32", "auto"
    rollout.prompt_length, rollout.response_length, rollout.max_model_len = 32, 32, 64
    rollout.max_num_batched_tokens, rollout.max_num_seqs, rollout.tensor_model_parallel_size = 64, 4, 1
    rollout.engine_kwargs.vllm = {"block_size": 32, "weight_transfer_config": {"backend": "penstock"}}
    server = (
        ray.remote(Server)
        .options(name="vllm_server_0_0", max_concurrency=100)
        .remote(
            config=config.rollout,
            model_config=config.model,
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=0,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="0",
        )
    )
    ray.get(server.launch_server.remote())
    trainers = verl_syncs.group(Trainer, 2, config=config, role="actor")
    trainers.init_model()
    rollout, their_model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
    receivers = verl_syncs.group(
        CheckpointEngineWorker, 1, rollout_config=rollout, model_config=their_model, replica_rank=0
    )
    replica = verl_syncs.Replica(receivers.workers, [server])
    manager = CheckpointEngineManager(rollout.checkpoint_engine, trainers, [replica])
    for step in range(3):
        trainers.change(step)
        metrics = manager.update_weights(global_steps=step)
        sampling = {"temperature": 0.0, "max_tokens": 8, "logprobs": True}
        answer = ray.get(server.generate.remote(PROMPT, sampling, f"request-{step}"))
        theirs, _ = trainers.log_probs(PROMPT, answer.token_ids)
        difference = max(abs(mine - other) for mine, other in zip(answer.log_probs, theirs, strict=True))
        print("STEP", json.dumps({"difference": difference, "tokens": len(theirs), **metrics}), flush=True)


if __name__ == "__main__":
    main()
