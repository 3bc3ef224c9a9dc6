"""verl's own workers and manager send versions to rollout workers with `checkpoint_engine.backend=penstock`.

    python verl_syncs.py MODEL '{"killed": "trainer", "stall_s": 5}'

This prints a line of JSON for each version. The classes are verl's: ActorRolloutRefWorker with its FSDP engine,
CheckpointEngineManager, CheckpointEngineWorker, RayWorkerGroup. Only the adapter and the questions to the workers are
ours. The adapter keeps digests of the tensors instead of loading them into an inference engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import verl
from omegaconf import OmegaConf, open_dict
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and bytes."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + data).hexdigest()


class Trainer(ActorRolloutRefWorker):
    """verl's trainer worker, whose weights a test changes and reads."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # verl would name the CPU twice, as the host and as the accelerator, which torch refuses.
        initialize_global_process_group_ray(backend="cpu:gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> None:
        """Set all weights to random integers, so that all ranks agree on them."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                whole = 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
                if isinstance(parameter, torch.distributed.tensor.DTensor):
                    whole = torch.distributed.tensor.distribute_tensor(
                        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                parameter.copy_(whole)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self) -> None:
        """Move the parameters to other memory, as verl does when it offloads them."""
        self.actor.engine.module._apply(lambda tensor: tensor.clone())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_at_publish(self) -> None:
        """Kill the last rank when it publishes the next version, after the others have begun to send it."""
        if self.rank == self.world_size - 1:
            self.checkpoint_engine._sender._publisher.publish = lambda version: os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, str]:
        """Return the digests of the whole tensors, as verl exports them. Collective."""
        tensors, _ = self.actor.engine.get_per_tensor_param()
        return {name: digest(tensor) for name, tensor in tensors}


class KeepingAdapter(BaseRollout):
    """A server adapter that keeps digests of the tensors instead of loading them into an engine."""

    def __init__(self) -> None:
        self.replica_rank, self.is_leader_rank = 0, True
        self.kept: dict[str, str] = {}
        self.begun = 0

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        kept = {}
        async for name, tensor in weights:
            self.begun += 1
            kept[name] = digest(tensor)
        self.kept = kept

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class Receiver(CheckpointEngineWorker):
    """verl's worker next to a rollout engine, with the adapter above."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, server_adapter=KeepingAdapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[dict[str, str], int]:
        """Return the digests of the last complete update, and the number of tensors that the adapter received."""
        return self.server_adapter.kept, self.server_adapter.begun

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_at_update(self) -> None:
        """Kill the last worker when it has received the next version, before it tells the others."""
        if self.rank == self.world_size - 1:
            self.checkpoint_engine._receiver._ranks.agree = lambda why: os.kill(os.getpid(), signal.SIGKILL)


class Replica:
    """The parts of a rollout replica that verl's manager uses during an update."""

    def __init__(self, workers: list[Any], servers: Sequence[Any] = ()) -> None:
        self.workers = workers
        self.servers = servers

    async def abort_all_requests(self, **_: Any) -> None:
        await asyncio.gather(*(server.abort_all_requests.remote() for server in self.servers))

    async def resume_generation(self) -> None:
        await asyncio.gather(*(server.resume_generation.remote() for server in self.servers))

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


def configuration(model: str, actor: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the `actor_rollout_ref` part of verl's configuration. `actor` is merged into the model's."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml").actor_rollout_ref
    with open_dict(config):
        config.model.path = model
        config.model.use_remove_padding = False
        config.model.enable_gradient_checkpointing = False
        config.model.override_config = {"attn_implementation": "sdpa"}
        config.model.update(actor)
        config.actor.strategy = config.actor.fsdp_config.strategy = "fsdp2"
        config.actor.fsdp_config.use_torch_compile = False
        # Compute like the server, so that log-probabilities can be compared.
        config.actor.fsdp_config.mixed_precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        config.actor.ppo_micro_batch_size_per_gpu = 1
        config.actor.ppo_mini_batch_size = 2
        config.actor.rollout_n = 1
        config.rollout.name = "vllm"
        config.rollout.log_prob_micro_batch_size_per_gpu = 1
        config.rollout.checkpoint_engine.backend = "penstock"
        config.rollout.checkpoint_engine.custom_backend_module = "penstock_rl.verl"
        config.rollout.checkpoint_engine.engine_kwargs = {"penstock": options}
    return config


def group(cls: type, count: int, **arguments: Any) -> RayWorkerGroup:
    """Start workers with a class."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool([count], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(cls), **arguments),
        device_name="cpu",
        use_gpu=False,
    )


def outcomes(calls: list[Any]) -> list[str]:
    """Return the names of the errors from calls, and an empty string for each call that succeeded."""
    names = []
    for call in calls:
        try:
            ray.get(call)
            names.append("")
        except ray.exceptions.RayTaskError as error:
            names.append(type(error.cause).__name__)
        except ray.exceptions.RayActorError:
            names.append("killed")
    return names


def main() -> None:
    """Send three versions, kill a worker during the fourth, and print the outcome of each."""
    model, text = sys.argv[1:]
    options = json.loads(text)
    killed, actor = options.pop("killed"), options.pop("actor", {})
    config = configuration(model, actor, options)
    names = ("PENSTOCK_RUNTIME_DIR", "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_DEVICE", "PYTHONPATH", "HF_HUB_OFFLINE")
    environ = {name: os.environ[name] for name in names} | {"OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"env_vars": environ})
    trainers = group(Trainer, 2, config=config, role="actor")
    trainers.init_model()
    rollout, their_model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
    receivers = group(Receiver, 2, rollout_config=rollout, model_config=their_model)
    manager = CheckpointEngineManager(
        omega_conf_to_dataclass(config.rollout.checkpoint_engine), trainers, [Replica(receivers.workers)]
    )
    for step in range(3):
        trainers.change(step)
        if step == 2:
            trainers.move()
        metrics = manager.update_weights(global_steps=step)
        theirs = trainers.digests()
        same = [kept == theirs[0] == theirs[1] for kept, _ in receivers.kept()]
        print("STEP", json.dumps({"same": same, "tensors": len(theirs[0]), **metrics}), flush=True)
    trainers.change(3)
    if killed == "trainer":
        trainers.die_at_publish()
    else:
        receivers.die_at_update()
    manager.build_process_group(receivers)
    ends = outcomes(trainers.update_weights(global_steps=3)), outcomes(receivers.update_weights(global_steps=3))
    alive = receivers.workers[:1] if killed == "receiver" else receivers.workers
    kept = ray.get([worker.kept.remote() for worker in alive])
    untouched = [digests == theirs[0] and begun == 3 * len(digests) for digests, begun in kept]
    print("KILLED", json.dumps({"trainers": ends[0], "receivers": ends[1], "untouched": untouched}), flush=True)


if __name__ == "__main__":
    main()
