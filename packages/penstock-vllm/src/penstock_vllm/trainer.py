"""The trainer's side of vLLM's weight transfer: a `TrainerWeightTransferEngine` named `penstock`.

Importing this module registers the engine with vLLM's `WeightTransferTrainerFactory`. Before 0.27, vLLM has no
interface for trainers, or a different one, and the import raises ConfigError.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import vllm

import penstock
from penstock import PublishReport
from penstock.errors import ConfigError
from penstock.spi import Declarable, PublishMode, connection_of
from penstock_vllm.plugin import LOAD_FORMAT

_HINT = "install vLLM 0.27 or newer, or use penstock.publisher and call vLLM's routes"

try:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine
except ImportError as error:
    raise ConfigError(f"vLLM {vllm.__version__} has no interface for trainers: {error}", hint=_HINT) from error
if "config" in inspect.signature(TrainerWeightTransferEngine.trainer_init).parameters:
    raise ConfigError(f"vLLM {vllm.__version__} has an older interface for trainers", hint=_HINT)

_REASON_CHARS = 2000

Params = torch.nn.Module | Mapping[str, Declarable]


@dataclass(kw_only=True)
class PenstockTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The arguments of Penstock's trainer engine. All ranks pass the same values, except `rank`."""

    backend: ClassVar[str] = LOAD_FORMAT

    name: str
    """Name of the sync. Trainers that send different weights to one engine need different names."""
    world_size: int = 1
    """Number of the trainer's ranks that call `trainer_init`."""
    hub: str | None = None
    """URL of the hub, for the trainer and the engine. None means `PENSTOCK_HUB`, or else this host's own hub."""
    token_file: str | None = None
    """Path of a file on the trainer's and the engine's host. The file's first token is sent to the hub."""
    listen: str | None = None
    """`host:port` at which other hosts reach this rank."""
    data_port: int = 0
    """See `ConnectionSettings`."""
    engine_listen: str | None = None
    """`host:port` at which other hosts reach the engine's first worker. The other workers use the ports after it."""
    engine_data_port: int | None = None
    """See `weight_transfer.InitInfo.data_port`."""
    mode: PublishMode = "snapshot"
    """With `snapshot`, the weights may change after they are copied. With `live`, nothing is copied, and the weights
    may change only after the engine has received them."""
    transforms: str | Mapping[str, Any] | None = None
    """Formats in which the weights are offered, such as `cast:BF16`. See `penstock.publisher`."""
    memory: Literal["device", "host"] = "device"
    """Memory into which the engine receives a version before it installs the version."""
    strict: bool = True
    """Require that every parameter of the engine is sent. If False, parameters that are not sent keep their previous
    values."""
    gather: bool = False
    """Publish copies from rank 0 if the source yields only unsharded tensors. The copies take as much memory as the
    model there."""
    stall_s: float | None = None


class PenstockTrainerEngine(TrainerWeightTransferEngine[PenstockTrainerInitInfo]):  # type: ignore[misc]
    """A trainer rank that sends versions to one vLLM engine. vLLM's factory creates this engine on every rank.

    Attributes:
        version: newest version that was published, or -1.
        report: report of the newest version.
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
        # Whether vLLM has an open update, and whether vLLM has received the update completely.
        self._is_started = self._is_staged = False

    @classmethod
    def trainer_init(cls, init_info: PenstockTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Publish the source's weights from this rank. On rank 0, make the engine subscribe.

        All ranks call this function at the same time.

        Args:
            source: vLLM's `ModuleSource`, a module, or tensors, DTensors and `Shard`s by name as for
                `penstock.publisher`. With `gather`, any `WeightSource`.

        Raises:
            ConfigError: the source is not supported. `penstock.publisher` and the client may raise other errors.
        """
        params, refill = _params(source, gather=init_info.gather, is_sender=init_info.is_sender)
        with contextlib.ExitStack() as ends:
            publisher = None
            if params is not None:
                publisher = penstock.publisher(
                    init_info.name,
                    params,
                    connection=connection_of(vars(init_info)),
                    # Copies of unsharded tensors can be published without a second copy.
                    mode="live" if refill is not None else init_info.mode,
                    transforms=init_info.transforms,
                    rank=(0, 1) if refill is not None else (init_info.rank, init_info.world_size),
                )
                ends.callback(publisher.close)
                if init_info.is_sender:
                    # A rank that joins after the first version would number its versions differently.
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
        """Publish the current weights and make the engine serve them.

        Pause the engine first, unless its weights may change between two forward passes. A pause is also necessary with
        vLLM's other backends. To pause the engine only for the installation, call `stage` and `commit` instead. The
        docstrings of `stage` and `commit` list the errors.
        """
        self.stage(version)
        self.commit()

    def stage(self, version: int | None = None) -> None:
        """Publish the current weights, and return when the engine has received and verified them.

        All ranks call this function. The weights may change as soon as this function returns.

        Args:
            version: version number, larger than all earlier numbers and the same on all ranks. The default is the next
                number.

        Raises:
            PenstockError: see `penstock.sync.Publisher.publish`. If a worker did not receive the version, rank 0
                instead raises the client's error, with vLLM's response as a note. After an error, the engine keeps its
                previous version.
        """
        self._is_staged = False
        self.version = self.version + 1 if version is None else version
        if self._refill is not None:
            self._refill()
        if self._publisher is None:
            # Rank 0 publishes the copies for all ranks.
            return
        newest = max(self._publisher.version, self._publisher.latest)
        if self.version <= newest:
            # Raise now, because the engine would otherwise wait for a version that `publish` refuses.
            raise ConfigError(
                f"version {self.version} of {self._publisher.name!r} is not above {newest}",
                hint="use a larger version number",
            )
        if not self.is_sender:
            self.report = self._publisher.publish(self.version)
            return
        with _answers_as_notes():
            # The engine must read while this rank publishes, because publishing a live version returns only after the
            # engine has read it. If the engine fails, the version is still published, as on the other ranks, and
            # `stage_again` can use it.
            received = self._thread.submit(self._receive)
            try:
                self.report = self._publisher.publish(self.version)
            finally:
                # Wait for the engine even if `publish` failed. The engine's stall deadline limits this wait. vLLM
                # closes an update that failed.
                self._is_started = received.exception() is None
            received.result()
        self._is_staged = True

    def stage_again(self) -> None:
        """Make a restarted engine subscribe and receive the newest version. Does nothing on ranks other than 0.

        The version is not published again, so the other ranks are not involved. Call `commit` to install the version.

        Raises:
            ConfigError: no version was published, or the mode is `live`, in which a version is withdrawn when the
                engine has received it. Other errors: see `stage`.
        """
        if not self.is_sender:
            return
        if self._publisher is None or self._publisher.version < 0:
            raise ConfigError("no version was published", hint="call stage()")
        if self._refill is not None or self._init_info.mode != "snapshot":
            raise ConfigError(
                f"version {self.version} was published live and is already withdrawn", hint="call stage() on all ranks"
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
        """Make the engine install the staged version. Does nothing on ranks other than 0.

        Raises:
            ConfigError: no version is staged.
            Exception: the client's error. After the error, the engine has no complete version and must not serve. Send
                the version again.
        """
        if not self.is_sender:
            return
        if not self._is_staged:
            raise ConfigError("no version is staged", hint="call stage() first, and again if it failed")
        self._is_staged = self._is_started = False
        with _answers_as_notes():
            self.client.finish_weight_update(weight_version=str(self.version))

    def shutdown(self) -> None:
        """Leave the sync. The engine keeps the version that it serves. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._thread.shutdown()


@contextlib.contextmanager
def _answers_as_notes() -> Iterator[None]:
    """Add vLLM's response as a note to a client's error, because vLLM's HTTP client reports only the status code."""
    try:
        yield
    except Exception as error:
        reason = getattr(getattr(error, "response", None), "text", "")
        if reason:
            error.add_note(f"vLLM's response: {reason[:_REASON_CHARS]}")
        raise


def _engine_info(info: PenstockTrainerInitInfo) -> dict[str, Any]:
    """Return the body of `/init_weight_transfer_engine` (`weight_transfer.InitInfo`), without unset fields."""
    values = {
        "name": info.name,
        "hub": info.hub,
        "token_file": info.token_file,
        "listen": info.engine_listen,
        "data_port": info.engine_data_port,
        "memory": info.memory,
        "strict": info.strict,
        "stall_s": info.stall_s,
    }
    return {key: value for key, value in values.items() if value is not None}


def _params(source: Any, *, gather: bool, is_sender: bool) -> tuple[Params | None, Callable[[], None] | None]:
    """Return the tensors that this rank publishes, and a function that refills them before each version.

    The tensors are None if this rank publishes nothing. Raises ConfigError if the source yields only unsharded tensors
    and `gather` is not set.
    """
    if isinstance(source, torch.nn.Module | Mapping):
        return source, None
    # Publish the DTensors of vLLM's private module as shards.
    module = getattr(source, "_module", None)
    if isinstance(source, ModuleSource) and isinstance(module, torch.nn.Module):
        return module, None
    if not gather:
        raise ConfigError(
            f"a {type(source).__name__} yields only unsharded tensors, which this rank does not store",
            hint="pass the module or its shards as source, or gather=True to keep a copy of all weights on rank 0",
        )
    copies: dict[str, torch.Tensor] = {}

    def refill() -> None:
        # All ranks iterate over the source, because gathering a tensor is a collective.
        for name, tensor in _whole_tensors(source):
            if not is_sender:
                continue
            if name not in copies:
                raise ConfigError(f"the source yields {name}, which was missing in the first pass")
            copies[name].copy_(tensor)

    for name, tensor in _whole_tensors(source):
        if is_sender:
            copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return (copies if is_sender else None), refill


def _whole_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


if LOAD_FORMAT not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, PenstockTrainerEngine)
