"""verl's checkpoint engine `penstock`: trainer ranks publish their shards, rollout workers receive whole versions.

In: verl's `CheckpointEngineManager` calls it on all workers. Out: verl's server adapter gets the tensors of a version
once all of them are verified on every worker of its replica.
Not here: the transfer (`penstock.sync`), loading into vLLM or SGLang (verl's server adapters).

    prepare             each worker says which version it has
    build_topology      the number of the next version, one for all
    init_process_group  a rollout worker subscribes
    send_weights        publish: FSDP2's shards as they are, else this rank's share of whole tensors
    receive_weights     receive and verify, agree with the other workers of the replica, then yield

With `receive: engine` the workers of vLLM receive instead, each its own part (`verl_vllm`); a rollout worker then
yields only what its adapter tells them.

verl gives `send_weights` whole tensors, made by a collective. It passes the training engine to one backend of its own
only, so importing this module makes the tensors of verl's FSDP engine say which engine they are of (`Exported`): then
nothing is gathered. Other training engines, LoRA and quantisation-aware training give whole tensors: each rank keeps an
equal share of these, and all ranks publish.

Importing this module (`custom_backend_module`) registers the backend. Written for verl 0.9.
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
"""verl's word for what `receive_weights` yields; this one: what the engine's workers need to receive by themselves."""
VERSIONS = ("0.9",)
"""Releases of verl that this module was run with."""

_LOGGER = log_named("penstock.verl")
_TIMEOUT_S = 600.0
"""Longest wait of a rollout worker for the trainer's version, which is shown after whole tensors were gathered."""


class Exported:
    """The whole tensors of a training engine, as verl iterates over them, and the engine that they are of."""

    def __init__(self, engine: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine = engine
        self._tensors = iter(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)


class PenstockCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine of one worker, of the trainer or of a rollout. Made by verl's registry.

    Args:
        bucket_size: verl's, of the buffer between a rollout worker and its engine; not used here.
        is_master: verl's; of trainer workers alone.
        name: of the sync; None: of this Ray job.
        hub: the hub's URL; None: of the environment, or of this host.
        token_file: a file whose first token is sent to the hub.
        listen: `host:port` where other hosts reach a worker; `node`: the address of its Ray node, any free port. None:
            this host only.
        data_port: second port at the host of `listen`, for the bytes that others read; 0: any free one.
        mode: `live`: the engines read the parameters, which verl does not change meanwhile. `snapshot`: they read a
            copy; then the parameters may change once it is made.
        transforms: formats in which the weights are sent, such as `cast:BF16`; see `penstock.publisher`.
        receive: `worker`: each rollout worker receives all tensors, and verl's adapter sends them to the engine.
            `engine`: the engine's own workers receive what they load. For vLLM, which is started with
            `weight_transfer_config: {backend: penstock}` then.
        memory: where a version is received before the engine installs it: `host` or `device`.
        timeout_s: longest wait for the trainer's version.
        stall_s: seconds without a byte after which a wait ends.

    Raises:
        ConfigError: an option has a value that is not known.
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
                raise ConfigError(f"engine_kwargs.penstock.{option} is {value!r}", hint=f"give {' or '.join(known)}")
        if receive == "engine":
            # An attribute that verl's worker passes to the adapter, which `verl_vllm` replaces.
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
        """Return what `build_topology` needs of this worker: the newest version that it knows."""
        latest = -1 if self._sender is None else self._sender.latest
        received = -1 if self._receiver is None else self._receiver.version
        return {"version": max(self._version, latest, received)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each trainer worker and each rollout worker."""
        # Not verl's step: a step is sent again after a failure, and versions grow.
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
        """Take the number of the next version; a rollout worker subscribes. Raises as `penstock.subscriber`."""
        self._rank, self._world_size = rank, world_size
        self._version, self._num_receivers = version, num_receivers
        if receives and self._receiver is None and self.wire_format != WIRE_FORMAT:
            self._receiver = VersionReceiver(
                self.name,
                connection=self._connection,
                device=self._device,
                transforms=_tags(self._transforms),
                rank=(rank, world_size),
                # The workers of one replica.
                group=_group_of_replica(),
            )

    def finalize(self) -> None:
        """Do nothing: publisher and subscriber stay for the next version."""

    # -- the trainer

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish a version from this rank; return its metrics, which verl logs.

        Raises:
            PenstockError: as `penstock.sync.Publisher.publish`. PeerLost: live, and some rollout workers do not have
                the version; gives their reasons.
        """
        why = _why_whole(weights)
        if why is None:
            params: Mapping[str, Declarable] = _shards(weights.engine)  # type: ignore[attr-defined]
            mode = self._mode
        else:
            if self._shares is None:
                _LOGGER.warning("penstock: whole tensors are gathered, of which each rank keeps a share: %s", why)
                self._shares = WholeTensorShares(self._rank, self._world_size)
            self._shares.fill(weights)
            # The shares are copies already.
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
                f"{len(report.committed)} of {self._num_receivers} rollout workers have version {report.version}: "
                f"{'; '.join(report.failed.values()) or 'the others are silent'}"
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

        If the engine receives: yield what its workers need for it, `("init_info", {...})` and `("update_info", {...})`.

        Raises:
            PenstockError: as `penstock.sync.Subscriber.update`. PeerLost: another worker of the replica did not
                receive the version, or is lost. Nothing was yielded: the engine serves what it served before.

        Ownership: the tensors are valid until the next version is received.
        """
        if self.wire_format == WIRE_FORMAT:
            yield "init_info", self._engine_info
            yield "update_info", {"version": self._version, "timeout_s": self._timeout_s}
            return
        # In a thread: other calls to this worker must be answered meanwhile.
        assert self._receiver is not None
        received = await asyncio.to_thread(self._receiver.receive, self._version, self._timeout_s)
        assert self._receiver.report is not None
        _LOGGER.info("penstock: step %s: %s", global_steps, self._receiver.report)
        for name, tensor in received.items():
            yield name, tensor


def _group_of_replica() -> torch.distributed.ProcessGroup | None:
    """Return torch.distributed's default group; None: it is not initialised, or has one rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.group.WORLD


def _why_whole(weights: object) -> str | None:
    """Return why a rank has whole tensors alone; None: the shards of its training engine can be published."""
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
    """Return this rank's part of a model of verl's FSDP engine, under the names that verl sends."""
    from verl.utils.model import convert_weight_keys

    state = convert_weight_keys(engine.module.state_dict(), engine.module)
    shards: dict[str, list[Shard]] = {}
    for row in declared_shards(state):
        for name, shard in _unfused(row, engine.model_config.hf_config.model_type):
            shards.setdefault(name, []).append(shard)
    return shards


def _unfused(row: ShardRow, model_type: str) -> Iterator[tuple[str, Shard]]:
    """Yield the parts of a row under the names of the checkpoint: transformers 5 packs experts, engines ask for each.

    The same names and cuts as verl's `unfuse_moe_params`.
    """
    box, shape, tensor = row.form.box, row.form.shape, row.tensor
    for suffix, names in _PACKED.items():
        if row.name.endswith(suffix) and len(shape) == 3 and model_type != "gpt_oss":
            base = row.name.removesuffix(suffix.rpartition(".experts")[2])
            width = shape[1] // len(names)
            for expert in range(box.start[0], box.stop[0]):
                for number, part in enumerate(names):
                    # The rows of this part that the box has.
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
"""The packed tensors of transformers 5, and the tensors of each expert that their second dim joins."""


def _tags(transforms: str | Mapping[str, Any] | None) -> Sequence[str] | None:
    """Return the tags that a receiver asks for, of a publisher's transforms."""
    if transforms is None or isinstance(transforms, str):
        return None if transforms is None else (transforms,)
    return tuple(transforms)


def _export(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> tuple[Exported, Any]:
    """Call verl's `get_per_tensor_param`, and have its tensors name the engine that they are of."""
    tensors, peft_config = original(self, *arguments, **named)
    return Exported(self, tensors), peft_config


def register() -> None:
    """Make the backend known to verl in this process. A second call does nothing.

    Raises:
        ConfigError: a release of verl that was not tried.
    """
    if not verl_version.startswith(tuple(f"{version}." for version in VERSIONS)):
        raise ConfigError(
            f"verl {verl_version} is not one of {', '.join(VERSIONS)}, which Penstock was run with",
            hint="install one of these, or choose another checkpoint_engine.backend",
        )
    if BACKEND in CheckpointEngineRegistry._registry:
        return
    # After the check: other releases may not have them.
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    CheckpointEngineRegistry.register(BACKEND)(PenstockCheckpointEngine)
    patch_once(FSDPEngine, get_per_tensor_param=_export)
    # By name: vLLM is imported by rollout workers alone, which import this module before their adapter.
    _ROLLOUT_REGISTRY["vllm", "async"] = "penstock_rl.verl_vllm.PenstockServerAdapter"


register()
