"""The trainer's side of vLLM's weight transfer: a `TrainerWeightTransferEngine` named `penstock`.

In: the weights of a trainer's ranks, a client of a vLLM server. Out: vLLM serves each version that is sent.
Not here: the engine's side (`weight_transfer`), the transfer (`penstock.sync`).

    trainer_init   every rank publishes; rank 0 makes the engine subscribe
    stage          publish || start_weight_update, update_weights: the engine receives while it may serve
    commit         finish_weight_update: the engine installs the version; this is the pause
    send_weights   both
    stage_again    an engine that was started again subscribes, and receives the version that is published

Importing this module registers the engine with vLLM's `WeightTransferTrainerFactory`. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import vllm
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine

import penstock
from penstock import PublishReport
from penstock.errors import ConfigError
from penstock.spi import Declarable, PublishMode, connection_of
from penstock_vllm.plugin import LOAD_FORMAT

VERSIONS = ("0.32", "0.33")
"""Releases of vLLM whose interface of trainers this module was written for."""

_REASON_CHARS = 2000

Params = torch.nn.Module | Mapping[str, Declarable]


@dataclass(kw_only=True)
class PenstockTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The arguments of Penstock's trainer engine; the same on all ranks but for `rank`."""

    backend: ClassVar[str] = LOAD_FORMAT

    name: str
    """The name of the sync: trainers of one engine that differ need different names."""
    world_size: int = 1
    """The number of the trainer's ranks that call `trainer_init`."""
    hub: str | None = None
    """The hub's URL, for the trainer and for the engine; None: of the environment, or of this host."""
    token_file: str | None = None
    """A file on the trainer's and on the engine's host, whose first token is sent to the hub."""
    listen: str | None = None
    """`host:port` where other hosts reach this rank."""
    data_port: int = 0
    """See `ConnectionSettings`."""
    engine_listen: str | None = None
    """`host:port` where other hosts reach the engine's first worker; the next ones listen at the ports after it."""
    engine_data_port: int | None = None
    """See `vllm_sync.InitInfo.data_port`."""
    mode: PublishMode = "snapshot"
    """`snapshot`: the weights may change once they are copied; `live`: not before the engine has them. No copy."""
    transforms: str | Mapping[str, Any] | None = None
    """Formats in which the weights are offered, such as `cast:BF16`; see `penstock.publisher`."""
    memory: Literal["device", "host"] = "device"
    """The memory in which the engine receives a version before it installs it."""
    strict: bool = True
    """Every parameter of the engine must be sent; False: those that are not sent stay as they were."""
    gather: bool = False
    """Publish copies on rank 0 of a source that can only give whole tensors: it takes the model's size there."""
    stall_s: float | None = None


class PenstockTrainerEngine(TrainerWeightTransferEngine[PenstockTrainerInitInfo]):  # type: ignore[misc]
    """A trainer rank that sends versions to one vLLM engine. Made by vLLM's factory, on every rank.

    Attributes:
        version: the newest version that was published; -1: none yet.
        report: of the newest version.
    """

    init_info_cls = PenstockTrainerInitInfo

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        is_sender: bool,
        publisher: Any,
        refill: Callable[[], None] | None,
        init_info: PenstockTrainerInitInfo,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.version: int = -1 if publisher is None else publisher.latest
        self.report: PublishReport | None = None
        self._publisher = publisher
        self._refill = refill
        self._init_info = init_info
        self._thread = ThreadPoolExecutor(1, "penstock-update-weights")
        # Whether vLLM has an update that was started and not finished, and whether it has received all of it.
        self._is_started = self._is_staged = False

    @classmethod
    def trainer_init(cls, init_info: PenstockTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Publish the source's weights from this rank; on rank 0, make the engine subscribe.

        Args:
            source: vLLM's `ModuleSource`; a module; tensors, DTensors and `Shard`s by name, as `penstock.publisher`
                takes them; or, with `gather`, any `WeightSource`. Nothing is gathered but with `gather`.

        Raises:
            ConfigError: the source, or the release of vLLM, is not one that this knows. Others as `penstock.publisher`,
                and the client's own.

        Order: all ranks call this at the same time.
        """
        if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
            raise ConfigError(
                f"vLLM {vllm.__version__} is not one of {', '.join(VERSIONS)}, whose trainers Penstock knows",
                hint="install one of these, or publish by penstock.publisher and call vLLM's routes",
            )
        params, refill = _params(source, gather=init_info.gather, is_sender=init_info.is_sender)
        with contextlib.ExitStack() as ends:
            publisher = None
            if params is not None:
                publisher = penstock.publisher(
                    init_info.name,
                    params,
                    connection=connection_of(vars(init_info)),
                    # Copies of whole tensors need no second copy.
                    mode="live" if refill is not None else init_info.mode,
                    transforms=init_info.transforms,
                    rank=(0, 1) if refill is not None else (init_info.rank, init_info.world_size),
                )
                ends.callback(publisher.close)
                if init_info.is_sender:
                    # A rank that joins after the first version would number on from it.
                    publisher.wait_ranks()
            if init_info.is_sender:
                client.init_weight_transfer_engine(_engine_info(init_info))
            made = cls(
                client=client,
                source=source,
                is_sender=init_info.is_sender,
                publisher=publisher,
                refill=refill,
                init_info=init_info,
            )
            ends.pop_all()
        return made

    def send_weights(self, version: int | None = None) -> None:
        """Publish the weights as they are now, and have the engine serve them. Raises as `stage` and `commit`.

        The engine should be paused, or be one that may change its weights between two forward passes, as for every
        backend of vLLM. Call `stage` and `commit` yourself to pause it for the second alone.
        """
        self.stage(version)
        self.commit()

    def stage(self, version: int | None = None) -> None:
        """Publish the weights as they are now; return when the engine has received and verified them.

        Args:
            version: above all before it; None: the next number. The same on all ranks.

        Raises:
            PenstockError: as `penstock.sync.Publisher.publish`. On rank 0 also the client's own error, with vLLM's
                answer as a note: a worker did not receive the version. The engine serves what it served before.

        Order: all ranks call this; the weights may change when it returns.
        """
        self._is_staged = False
        self.version = self.version + 1 if version is None else version
        if self._refill is not None:
            self._refill()
        if self._publisher is None:
            # Rank 0 publishes the copies of all.
            return
        newest = max(self._publisher.version, self._publisher.latest)
        if self.version <= newest:
            # Before the engine is asked: it would wait for a version that is refused here.
            raise ConfigError(
                f"version {self.version} of {self._publisher.name!r} is not above {newest}", hint="versions grow"
            )
        if not self.is_sender:
            self.report = self._publisher.publish(self.version)
            return
        with _answers_as_notes():
            # At the same time: the engine reads what is published, and a live version ends when it was read. If there
            # is no engine, the version is published all the same, as the other ranks do: `stage_again` needs it.
            received = self._thread.submit(self._receive)
            try:
                self.report = self._publisher.publish(self.version)
            finally:
                # With an error of `publish` too: the engine gives up within its stall deadline, and must not stay busy.
                # After a failed update vLLM has ended the update that was started.
                self._is_started = received.exception() is None
            received.result()
        self._is_staged = True

    def stage_again(self) -> None:
        """Have an engine that was started again subscribe and receive the newest version; rank 0 does it.

        Nothing is published anew, so the other ranks take no part; `commit` then installs the version.

        Raises:
            ConfigError: no version was published, or versions are `live`: they end when the engine has them. Others as
                `stage`.
        """
        if not self.is_sender:
            return
        if self._publisher is None or self._publisher.version < 0:
            raise ConfigError("no version was published", hint="call stage()")
        if self._refill is not None or self._init_info.mode != "snapshot":
            raise ConfigError(
                f"version {self.version} was published live: nothing has it any more", hint="call stage() on all ranks"
            )
        self._is_staged = self._is_started = False
        with _answers_as_notes():
            self.client.init_weight_transfer_engine(_engine_info(self._init_info))
            self._receive()
        self._is_started = self._is_staged = True

    def _receive(self) -> None:
        if not self._is_started:
            self.client.start_weight_update()
        self.client.update_weights({"version": self.version})

    def commit(self) -> None:
        """Have the engine install the version that was staged; rank 0 does it, the others return.

        Raises:
            ConfigError: no version is staged. Others as the client: the engine then has no complete version and must
                not serve; send again.
        """
        if not self.is_sender:
            return
        if not self._is_staged:
            raise ConfigError("no version is staged", hint="call stage() first; if it failed, call it again")
        self._is_staged = self._is_started = False
        with _answers_as_notes():
            self.client.finish_weight_update(weight_version=str(self.version))

    def shutdown(self) -> None:
        """Leave the sync; the engine keeps its version. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._thread.shutdown()


@contextlib.contextmanager
def _answers_as_notes() -> Iterator[None]:
    """Add vLLM's answer to an error of the client: the client of vLLM's routes raises the status alone."""
    try:
        yield
    except Exception as error:
        reason = getattr(getattr(error, "response", None), "text", "")
        if reason:
            error.add_note(f"vLLM's answer: {reason[:_REASON_CHARS]}")
        raise


def _engine_info(info: PenstockTrainerInitInfo) -> dict[str, Any]:
    """Return the body of `/init_weight_transfer_engine`: `vllm_sync.InitInfo`, without what is not given."""
    given = {
        "name": info.name,
        "hub": info.hub,
        "token_file": info.token_file,
        "listen": info.engine_listen,
        "data_port": info.engine_data_port,
        "memory": info.memory,
        "strict": info.strict,
        "stall_s": info.stall_s,
    }
    return {key: value for key, value in given.items() if value is not None}


def _params(source: Any, *, gather: bool, is_sender: bool) -> tuple[Params | None, Callable[[], None] | None]:
    """Return what this rank publishes, and what fills it before each version; None, None: this rank publishes nothing.

    Raises:
        ConfigError: the source gives whole tensors only, and `gather` is not set.
    """
    if isinstance(source, torch.nn.Module | Mapping):
        return source, None
    # vLLM keeps the module to itself. Its DTensors are published as the shards that they are.
    module = getattr(source, "_module", None)
    if isinstance(source, ModuleSource) and isinstance(module, torch.nn.Module):
        return module, None
    if not gather:
        raise ConfigError(
            f"a {type(source).__name__} gives whole tensors, which this rank does not keep",
            hint="pass the module or its shards as source; or gather=True: rank 0 then keeps a copy of all weights",
        )
    copies: dict[str, torch.Tensor] = {}

    def refill() -> None:
        # All ranks iterate: to make a tensor whole is a collective.
        for name, tensor in _whole_tensors(source):
            if not is_sender:
                continue
            if name not in copies:
                raise ConfigError(f"the source gives {name}, which it did not give before")
            copies[name].copy_(tensor)

    for name, tensor in _whole_tensors(source):
        if is_sender:
            copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return (copies if is_sender else None), refill


def _whole_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a pass over a `WeightSource`: vLLM 0.33 names it `iter_full`, 0.32 has `__iter__`."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


if LOAD_FORMAT not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, PenstockTrainerEngine)
