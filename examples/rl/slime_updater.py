"""slime: its trainer ranks publish their shards of Megatron parameters, and its SGLang engines receive them.

    --custom-megatron-init-path examples.rl.slime_updater.install
    --custom-update-weight-post-write-path examples.rl.slime_updater.write_manifest     # if it sends through a disk

slime calls `install` in each trainer rank, and then the updater like its own. slime's own updater gathers each tensor
on one rank of each pipeline stage, converts it, and broadcasts it. This updater publishes each rank's parameters in
place, as boxes of Hugging Face tensors. Start SGLang with `--sglang-load-format penstock`. It updates from the path
`sync://NAME/VERSION`.

slime is not on PyPI. This is written for the interface of `UpdateWeightFromDisk` in its public source of November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch

import penstock
from penstock import ConnectionSettings
from penstock.errors import ConfigError
from penstock.spi import Declarable, PublishMode, TrainerPublisher
from penstock_rl.megatron import Grid, from_megatron
from penstock_sglang.plugin import SYNC

Shards = Callable[[Any, Sequence[torch.nn.Module]], Mapping[str, Declarable]]
"""A function that returns this rank's shards by checkpoint name, for slime's arguments and the model's chunks."""


class PenstockUpdater:
    """An updater with the interface of slime's own. Each trainer rank has one.

    Args:
        args: slime's arguments. `rank` and `world_size` are the trainer's.
        model: The chunks on this rank.
        name: Name of the sync.
        connection: See `penstock.join`. None means the hub from the environment.
        mode: With `snapshot`, the engines read a copy on the device.
        shards: See `Shards`. None means those of Megatron's GPTModel.

    Attributes:
        weight_version: Newest version that was sent.
    """

    def __init__(
        self,
        args: Any,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        *,
        model_name: str = "",
        quantization_config: Mapping[str, Any] | None = None,
        name: str = "slime",
        connection: ConnectionSettings | None = None,
        mode: PublishMode = "snapshot",
        shards: Shards | None = None,
    ) -> None:
        self.weight_version = 0
        self._args, self._model = args, model
        self._mode: PublishMode = mode
        self._shards = shards or megatron_shards
        self._engines: Sequence[Any] = ()
        self._metrics: dict[str, float] = {}
        self._sender = TrainerPublisher(
            name, connection=connection or ConnectionSettings(), rank=(args.rank, args.world_size)
        )

    def connect_rollout_engines(
        self, rollout_engines: Sequence[Any], rollout_engine_lock: Any = None, *_: Any, **__: Any
    ) -> None:
        """Store the engines for the next versions. They need no setup, because they subscribe by themselves."""
        self._engines = rollout_engines

    def disconnect_rollout_engines(self) -> None:
        """Forget the engines. They keep their version."""
        self._engines = ()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the versions since the last call, for slime's log."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @torch.no_grad()
    def update_weights(self) -> None:
        """Publish a version from every rank. Rank 0 makes the engines receive it, and waits until they have it.

        Raises:
            PenstockError: See `penstock.sync.Publisher.publish`.
            Exception: On rank 0, an engine's own error. This engine keeps its previous version, and stays paused.
        """
        # slime shows the sync's number, because a restarted trainer continues from the engines' version.
        report = self._sender.publish(self._shards(self._args, self._model), mode=self._mode)
        self.weight_version = report.version
        self._metrics = {"penstock/publish_s": report.wall_s, "penstock/bytes": float(report.nbytes)}
        if self._args.rank == 0:
            path = f"{SYNC}{self._sender.name}/{report.version}"
            ray.get([engine.pause_generation.remote() for engine in self._engines])
            ray.get([engine.flush_cache.remote() for engine in self._engines])
            ray.get(
                [
                    engine.update_weights_from_disk.remote(model_path=path, weight_version=str(report.version))
                    for engine in self._engines
                ]
            )
            ray.get([engine.continue_generation.remote() for engine in self._engines])
        if torch.distributed.is_initialized():
            # As in slime's own updater, no rank trains while the engines receive.
            torch.distributed.barrier()


def install(args: Any) -> None:
    """Make slime's trainer use `PenstockUpdater`. slime calls this in each trainer rank, before it creates its updater.

    Raises:
        ConfigError: This slime lacks the updater that is replaced.
    """
    from slime.backends.megatron_utils import actor

    names = [name for name in ("UpdateWeightFromDistributed", "UpdateWeightFromDisk") if hasattr(actor, name)]
    if not names:
        raise ConfigError(
            "slime's trainer has no UpdateWeightFromDistributed", hint="Penstock does not know this slime"
        )
    for name in names:
        setattr(actor, name, PenstockUpdater)


def write_manifest(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Write the digests of a version's files next to them, so that SGLang's `penstock` load format can verify them.

    This is for slime's transport through a disk. An engine that reads a file before it is complete raises an error, and
    keeps the previous weights. slime calls this on every rank.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        # The trainer has just written these bytes. An existing manifest is from an earlier run's version.
        penstock.manifest(version_dir, replace=True)


def megatron_shards(args: Any, model: Sequence[torch.nn.Module]) -> dict[str, Declarable]:
    """Return one rank's shards of Megatron's GPTModel, from slime's arguments and Megatron's parallel state."""
    from megatron.core import mpu
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    shards: dict[str, Declarable] = {}
    for number, chunk in enumerate(model):
        grid = Grid(
            num_heads=args.num_attention_heads,
            num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            head_dim=args.kv_channels,
            vocab_size=args.vocab_size,
            num_experts=args.num_experts or 0,
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            tp=mpu.get_tensor_model_parallel_world_size(),
            ep_rank=mpu.get_expert_model_parallel_rank(),
            ep=mpu.get_expert_model_parallel_world_size(),
            expert_tp_rank=mpu.get_expert_tensor_parallel_rank(),
            expert_tp=mpu.get_expert_tensor_parallel_world_size(),
            layer_offset=get_transformer_layer_offset(chunk.config, number),
        )
        shards |= from_megatron(chunk, grid)
    return shards
