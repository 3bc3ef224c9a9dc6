"""slime: its trainer ranks publish their shards of Megatron parameters, and its SGLang engines receive them.

In: slime calls `install` in each trainer rank, then the updater as its own. Out: SGLang engines have the version.
Not here: the engines' side (`penstock_sglang`), names and cuts of Megatron's parameters (`penstock_rl.megatron`),
publishing (`penstock.spi.sender`).

    --custom-megatron-init-path examples.rl.slime_updater.install
    --custom-update-weight-post-write-path examples.rl.slime_updater.write_manifest     # if it sends by disk

slime's own updater gathers each tensor on one rank of each pipeline stage, converts it, and broadcasts it. This one
publishes each rank's parameters in place, as boxes of the tensors of Hugging Face. SGLang is started with
`--sglang-load-format penstock`; `sync://NAME/VERSION` is the path that it updates from.

slime is not on PyPI: written for the interface of `UpdateWeightFromDisk` in its public source of November 2026.
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
"""Returns this rank's shards by the checkpoint's names, of slime's arguments and the model's chunks."""


class PenstockUpdater:
    """An updater with the interface of slime's own; one on each trainer rank.

    Args:
        args: slime's; `rank` and `world_size` are the trainer's.
        model: the chunks of this rank.
        name: of the sync.
        connection: see `penstock.join`; None: the hub of the environment.
        mode: `snapshot`: the engines read a copy on the device.
        shards: see `Shards`; None: those of Megatron's GPTModel.

    Attributes:
        weight_version: the newest version that was sent.
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
        """Take the engines of the next versions. Nothing is set up for them: they subscribe by themselves."""
        self._engines = rollout_engines

    def disconnect_rollout_engines(self) -> None:
        """Forget the engines; they keep their version."""
        self._engines = ()

    def pop_metrics(self) -> dict[str, float]:
        """Return the numbers of the versions since the last call, for slime to log."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @torch.no_grad()
    def update_weights(self) -> None:
        """Publish a version from every rank; rank 0 has the engines receive it, and returns when they have it.

        Raises:
            PenstockError: as `penstock.sync.Publisher.publish`. On rank 0 also the engines' own error: an engine that
                did not receive the version serves what it served before, and stays paused.
        """
        # The number that slime shows is the sync's: a restarted trainer numbers on from what engines have.
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
            # As slime's own: no rank trains on while the engines receive.
            torch.distributed.barrier()


def install(args: Any) -> None:
    """Have slime's trainer use `PenstockUpdater`. slime calls it in each trainer rank, before it makes its updater.

    Raises:
        ConfigError: this slime has no updater of the name that is replaced.
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
    """Write the digests of a version's files beside them: SGLang's `penstock` load format verifies what it reads.

    For slime's transport by disk: an engine that reads a file before all of it is visible there raises, and serves the
    weights before. slime calls it on every rank.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        # The trainer has just written these bytes: a manifest there is of an earlier run's version of this number.
        penstock.manifest(version_dir, replace=True)


def megatron_shards(args: Any, model: Sequence[torch.nn.Module]) -> dict[str, Declarable]:
    """Return the shards of one rank of Megatron's GPTModel, of slime's arguments and Megatron's parallel state."""
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
