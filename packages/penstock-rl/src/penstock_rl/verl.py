"""verl's checkpoint engine `penstock`: trainer ranks publish their shards, and rollout workers receive whole versions.

With the option `receive: engine`, vLLM's workers receive their own slices (`verl_vllm`), and a rollout worker only
passes on the information that vLLM's workers require.

verl passes `send_weights` unsharded tensors, which it gathers with a collective. After this module is imported, the
tensors from verl's FSDP engine carry a reference to the engine (`Exported`), so the engine's shards are published and
nothing is gathered. With other training engines, LoRA or quantisation-aware training, verl yields unsharded tensors.
Each rank copies and publishes an equal share of unsharded tensors.

Importing this module (`custom_backend_module`) registers the backend. This module is written for verl 0.9.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ray
import torch
from verl import __version__ as verl_version
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from penstock import Shard
from penstock.errors import ConfigError, PeerLost
from penstock.spi import (
    Declarable,
    PublishMode,
    ShardRow,
    TrainerPublisher,
    VersionReceiver,
    WholeTensorShares,
    connection_of,
    declared_shards,
    log_named,
    patch_once,
)

BACKEND = "penstock"
WIRE_FORMAT = "penstock"
"""verl's name for the kind of data that `receive_weights` yields. Penstock yields information for the engine's
workers."""
VERSIONS = ("0.9",)
"""Supported releases of verl."""

_LOGGER = log_named("penstock.verl")
_TIMEOUT_S = 600.0
"""Maximum wait in seconds for the trainer's version. A version of unsharded tensors is announced only after they are
gathered."""


class Exported:
    """A training engine's unsharded tensors in verl's iteration order, with a reference to the engine."""

    def __init__(self, engine: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine = engine
        self._tensors = iter(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)


class PenstockCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine for one trainer worker or rollout worker. verl's registry creates this object.

    An option with an unknown value raises ConfigError.

    Args:
        bucket_size: size of verl's buffer between a rollout worker and its engine. Not used here.
        is_master: verl's flag for trainer workers. Not used here.
        name: name of the sync. The default name contains this Ray job's id.
        hub: URL of the hub. The default hub is `PENSTOCK_HUB`, or else this host's own hub.
        token_file: path of a file whose first token is sent to the hub.
        listen: `host:port` at which other hosts reach a worker. `node` means the address of the worker's Ray node and
            any free port. If `listen` is None, only this host reaches the worker.
        data_port: second port at the host of `listen`, from which peers read bytes. Port 0 means any free port.
        mode: in `live` mode, engines read the parameters directly, and verl does not change the parameters meanwhile.
            In `snapshot` mode, engines read a copy, and the parameters may change as soon as the copy is complete.
        transforms: formats in which the weights are sent, such as `cast:BF16`. See `penstock.publisher`.
        receive: if `worker`, each rollout worker receives all tensors, and verl's adapter sends the tensors to the
            engine. If `engine`, the engine's own workers receive the slices that they load, which requires a vLLM
            started with `weight_transfer_config: {backend: penstock}`.
        memory: memory into which a version is received before the engine installs it: `host` or `device`.
        timeout_s: maximum wait in seconds for the trainer's version.
        stall_s: seconds without a byte after which a wait is aborted.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool | None = None,
        *,
        name: str | None = None,
        hub: str | None = None,
        token_file: str | None = None,
        listen: str | None = None,
        data_port: int = 0,
        mode: PublishMode = "live",
        transforms: str | Mapping[str, Any] | None = None,
        receive: Literal["worker", "engine"] = "worker",
        memory: Literal["host", "device"] = "host",
        timeout_s: float = _TIMEOUT_S,
        stall_s: float | None = None,
    ) -> None:
        for option, value, known in (
            ("memory", memory, ("host", "device")),
            ("mode", mode, ("live", "snapshot")),
            ("receive", receive, ("worker", "engine")),
        ):
            if value not in known:
                raise ConfigError(f"engine_kwargs.penstock.{option} is {value!r}", hint=f"set {' or '.join(known)}")
        if receive == "engine":
            # verl's worker passes this attribute to the adapter, which `verl_vllm` replaces.
            self.wire_format = WIRE_FORMAT
        self.name = name or f"verl-{ray.get_runtime_context().get_job_id()}"
        listen = f"{ray.util.get_node_ip_address()}:0" if listen == "node" else listen
        self._mode: PublishMode = mode
        self._transforms = transforms
        self._device = "cpu" if memory == "host" else f"cuda:{torch.cuda.current_device()}"
        self._engine_info: dict[str, Any] = {
            "name": self.name,
            "hub": hub,
            "token_file": token_file,
            "listen": listen,
            "data_port": data_port,
            "memory": memory,
            "stall_s": stall_s,
        }
        self._connection = connection_of(self._engine_info)
        self._timeout_s = timeout_s
        self._version = -1
        self._rank, self._world_size, self._num_receivers = 0, 1, 0
        self._sender: TrainerPublisher | None = None
        self._shares: WholeTensorShares | None = None
        self._receiver: VersionReceiver | None = None

    # -- called by verl before each version

    def prepare(self) -> dict[str, Any]:
        """Return this worker's input to `build_topology`, which is the newest version that the worker knows."""
        latest = -1 if self._sender is None else self._sender.latest
        received = -1 if self._receiver is None else self._receiver.version
        return {"version": max(self._version, latest, received)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each trainer worker and each rollout worker."""
        # Do not use verl's step as the version number. verl sends a step again after a failure, but version numbers
        # have to increase.
        version = 1 + max((worker["version"] for worker in metadata), default=-1)

        def arguments(world_size: int) -> dict[str, list[Any]]:
            return {
                "rank": list(range(world_size)),
                "world_size": [world_size] * world_size,
                "version": [version] * world_size,
                "num_receivers": [rollout_world_size] * world_size,
            }

        trainer, rollout = arguments(actor_wg_world_size), arguments(rollout_world_size)
        return trainer | {"receives": [False] * actor_wg_world_size}, rollout | {
            "receives": [True] * rollout_world_size
        }

    def init_process_group(
        self, rank: int, world_size: int, version: int, num_receivers: int, *, receives: bool
    ) -> None:
        """Store the number of the next version. A rollout worker also subscribes.

        Raises the same errors as `penstock.subscriber`.
        """
        self._rank, self._world_size = rank, world_size
        self._version, self._num_receivers = version, num_receivers
        if receives and self._receiver is None and self.wire_format != WIRE_FORMAT:
            self._receiver = VersionReceiver(
                self.name,
                connection=self._connection,
                device=self._device,
                transforms=_tags(self._transforms),
                rank=(rank, world_size),
                # The group contains the workers of one replica.
                group=_group_of_replica(),
            )

    def finalize(self) -> None:
        """Do nothing, because the publisher and the subscriber are used again for the next version."""

    # -- the trainer

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish a version from this rank, and return metrics for verl's log.

        Raises:
            PenstockError: see `penstock.sync.Publisher.publish`.
            PeerLost: the mode is live and some rollout workers did not receive the version. The message states the
                reasons.
        """
        why = _why_whole(weights)
        if why is None:
            params: Mapping[str, Declarable] = _shards(weights.engine)  # type: ignore[attr-defined]
            mode = self._mode
        else:
            if self._shares is None:
                _LOGGER.warning("penstock: gathering whole tensors, and each rank keeps a share: %s", why)
                self._shares = WholeTensorShares(self._rank, self._world_size)
            self._shares.fill(weights)
            # The tensors in `_shares` are already copies, so publish them without a further copy.
            params, mode = self._shares.params, "live"
        if self._sender is None:
            self._sender = TrainerPublisher(
                self.name,
                connection=self._connection,
                transforms=self._transforms,
                rank=(self._rank, self._world_size),
            )
        report = self._sender.publish(params, self._version, mode=mode, num_receivers=self._num_receivers)
        _LOGGER.info("penstock: step %s: %s", global_steps, report)
        if mode == "live" and len(report.committed) < self._num_receivers:
            raise PeerLost(
                f"only {len(report.committed)} of {self._num_receivers} rollout workers have version {report.version}: "
                f"{'; '.join(report.failed.values()) or 'the other workers did not respond'}"
            )
        return {
            "penstock/version": report.version,
            "penstock/publish_s": report.wall_s,
            "penstock/bytes": report.nbytes,
            "penstock/sharded": int(why is None),
        }

    # -- a rollout worker

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield all tensors of the version, after every worker of this replica has received and verified all of them.

        With `receive: engine`, yield information for the engine's workers: `("init_info", {...})` and `("update_info",
        {...})`. The tensors are valid until the next version is received.

        Raises:
            PenstockError: see `penstock.sync.Subscriber.update`.
            PeerLost: a different worker of the replica failed to receive the version, or is lost. Nothing was yielded,
                and the engine keeps its previous version.
        """
        if self.wire_format == WIRE_FORMAT:
            yield "init_info", self._engine_info
            yield "update_info", {"version": self._version, "timeout_s": self._timeout_s}
            return
        # Receive in a thread, so that this worker can respond to other calls.
        assert self._receiver is not None
        received = await asyncio.to_thread(self._receiver.receive, self._version, self._timeout_s)
        assert self._receiver.report is not None
        _LOGGER.info("penstock: step %s: %s", global_steps, self._receiver.report)
        for name, tensor in received.items():
            yield name, tensor


def _group_of_replica() -> torch.distributed.ProcessGroup | None:
    """Return torch.distributed's default group, or None if it is not initialised or has one rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.group.WORLD


def _why_whole(weights: object) -> str | None:
    """Return why this rank has only unsharded tensors, or None if its engine's shards can be published."""
    if not isinstance(weights, Exported):
        return "verl's training engine is not its FSDP engine"
    from verl.utils.fsdp_utils import fsdp_version

    engine = weights.engine
    if fsdp_version(engine.module) != 2:
        return "the actor's strategy is not fsdp2"
    if hasattr(engine.module, "peft_config"):
        return "the model has LoRA adapters"
    if engine._qat_enabled:
        return "the trainer quantises (QAT)"
    return None


def _shards(engine: Any) -> dict[str, list[Shard]]:
    """Return this rank's shards of a model in verl's FSDP engine, under the names that verl sends."""
    from verl.utils.model import convert_weight_keys

    state = convert_weight_keys(engine.module.state_dict(), engine.module)
    shards: dict[str, list[Shard]] = {}
    for row in declared_shards(state):
        for name, shard in _unfused(row, engine.model_config.hf_config.model_type):
            shards.setdefault(name, []).append(shard)
    return shards


def _unfused(row: ShardRow, model_type: str) -> Iterator[tuple[str, Shard]]:
    """Yield the experts of a packed tensor, named and split as in verl's `unfuse_moe_params`.

    transformers 5 packs experts into one tensor, but engines expect one tensor for each expert.
    """
    box, shape, tensor = row.form.box, row.form.shape, row.tensor
    for suffix, names in _PACKED.items():
        if row.name.endswith(suffix) and len(shape) == 3 and model_type != "gpt_oss":
            base = row.name.removesuffix(suffix.rpartition(".experts")[2])
            width = shape[1] // len(names)
            for expert in range(box.start[0], box.stop[0]):
                for number, part in enumerate(names):
                    # Rows of this projection that this rank's shard contains.
                    start = max(box.start[1], number * width)
                    stop = min(box.stop[1], (number + 1) * width)
                    if start < stop:
                        yield (
                            f"{base}.{expert}.{part}.weight",
                            Shard(
                                tensor=tensor[expert - box.start[0], start - box.start[1] : stop - box.start[1]],
                                global_shape=(width, shape[2]),
                                offset=(start - number * width, box.start[2]),
                            ),
                        )
            return
    yield row.name, Shard(tensor=tensor, global_shape=tuple(shape), offset=tuple(box.start))


_PACKED: Mapping[str, tuple[str, ...]] = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}
"""Names of packed tensors in transformers 5, each with the names of an expert's tensors, which are joined along the
second dim."""


def _tags(transforms: str | Mapping[str, Any] | None) -> Sequence[str] | None:
    """Return the tags that a receiver requests for a publisher's transforms."""
    if transforms is None or isinstance(transforms, str):
        return None if transforms is None else (transforms,)
    return tuple(transforms)


def _export(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> tuple[Exported, Any]:
    """Call verl's `get_per_tensor_param`, and return its tensors with a reference to the engine."""
    tensors, peft_config = original(self, *arguments, **named)
    return Exported(self, tensors), peft_config


def register() -> None:
    """Register the backend with verl in this process. A second call does nothing.

    An unsupported release raises ConfigError.
    """
    if not verl_version.startswith(tuple(f"{version}." for version in VERSIONS)):
        raise ConfigError(
            f"Penstock supports verl {', '.join(VERSIONS)}, not {verl_version}",
            hint="install one of these releases, or choose another checkpoint_engine.backend",
        )
    if BACKEND in CheckpointEngineRegistry._registry:
        return
    # Unsupported releases may lack these names, so import them after the check.
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    CheckpointEngineRegistry.register(BACKEND)(PenstockCheckpointEngine)
    patch_once(FSDPEngine, get_per_tensor_param=_export)
    # Register by name, because only rollout workers import vLLM. Rollout workers import this module before their
    # adapter.
    _ROLLOUT_REGISTRY["vllm", "async"] = "penstock_rl.verl_vllm.PenstockServerAdapter"


register()
