"""vLLM's `--weight-transfer-config '{"backend": "penstock"}'`: new versions of the weights from a trainer's ranks.

In: vLLM's worker calls it, by its HTTP routes or `collective_rpc`; a publisher publishes. Out: the model has a version.
Not here: the transfer (`penstock.sync`), installing (`vllm_staging`), prefix caches (`vllm_prefix_cache`).

    /init_weight_transfer_engine {name, hub}   each worker becomes a subscriber with a staging model
    /start_weight_update
    /update_weights {version}                  receives and verifies it in the staging model; the model is not touched
    /pause, /finish_weight_update, /resume     installs it: all workers have it, or the route failed before

Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from penstock import api
from penstock.config import ConnectionSettings
from penstock.errors import ConfigError, PeerLost
from penstock.hub.auth import first_token
from penstock.integrations.vllm_log import vllm_logger
from penstock.integrations.vllm_staging import StagingModel

_logger = vllm_logger()
_TOLD_BYTES = 1024
"""Of an error's text, to the other workers."""


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The body of `/init_weight_transfer_engine`: the sync to receive from, and where its versions go."""

    name: str
    """What the publisher publishes under."""
    hub: str | None = None
    token_file: str | None = None
    """A file whose first token is shown to the hub."""
    listen: str | None = None
    """`host:port` where other hosts reach the first worker, the next ones at the ports after it."""
    memory: Literal["device", "host"] = "device"
    """Where a version lands: beside the model, or in host memory where the device has no room."""
    strict: bool = True
    """Every parameter must be published; else those that are not stay as they were loaded."""
    serve: bool = True
    """Whether other subscribers may take a version from this one."""
    memory_bytes: int | str | None = None
    stall_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"init_info 'name' must be a text, not {self.name!r}")
        if self.memory not in ("device", "host"):
            raise ConfigError(f"init_info 'memory' must be 'device' or 'host', not {self.memory!r}")


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The body of `/update_weights`."""

    version: int
    """Exactly this one, so that all workers land the same."""
    background: bool = False
    """Answer at once and receive while the model serves; the same call without it then waits for the end."""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 0:
            raise ConfigError(f"update_info 'version' must be a number from 0 on, not {self.version!r}")


class PenstockWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's end of a sync. vLLM makes it with the model loaded, and calls it from one thread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """No I/O.

        Raises:
            ConfigError: experts are moved between ranks while the model serves.
        """
        super().__init__(config, vllm_config, device, model)
        if vllm_config.parallel_config.enable_eplb:
            raise ConfigError("experts that vLLM moves (EPLB) have no layout that lasts", hint="disable EPLB")
        self._joined: tuple[Any, StagingModel] | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-receive")
        self._receiving: tuple[int, Future[None]] | None = None
        self._landed: int | None = None
        self._may_load, self._strict = False, True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe. Again: to another, in the place of the one before.

        Raises:
            ConfigError, HubUnavailable: see `penstock.subscriber`.
            DeviceOutOfMemory, DestinationError: no room for a staging model.
        """
        self.shutdown()
        device = self.device if init_info.memory == "device" else torch.device("cpu")
        rank, world_size = _rank_of(self.parallel_config)
        with contextlib.ExitStack() as stack:
            with _agreed():
                staging = StagingModel(self.model, self.vllm_config, device)
                subscriber = api.subscriber(
                    init_info.name,
                    staging,
                    connection=ConnectionSettings(
                        hub=init_info.hub,
                        token=first_token(init_info.token_file),
                        listen=_listen(init_info.listen, rank),
                        stall_s=init_info.stall_s,
                    ),
                    mode="direct",  # into the staging model: what serves is not touched before it is whole
                    load=self._load,
                    strict=False,  # the staging model knows better what must be filled
                    rank=(rank, world_size),
                    serve=init_info.serve,
                    memory_bytes=init_info.memory_bytes,
                )
                stack.callback(subscriber.close)
            stack.pop_all()
        self._joined, self._strict = (subscriber, staging), init_info.strict
        _logger.info("penstock: rank %d of %d subscribes to %s", rank, world_size, init_info.name)

    def start_weight_update(self) -> None:
        """Begin. Nothing is touched: the model may serve until `finish_weight_update`."""
        self._parts()
        self._landed = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive a version into the staging model; all workers of the engine have it then, or all raise.

        Raises:
            ConfigError: another version is being received.
            PenstockError: see `penstock.Subscriber.update`; the model serves what it did.
        """
        subscriber, _ = self._parts()
        version = update_info.version
        receiving = self._receiving
        if receiving is not None:
            running, done = receiving
            if running != version and not _all(done.done()):
                raise ConfigError(f"version {running} is being received", hint="wait for it by /update_weights")
            if running == version and update_info.background:
                return
            self._receiving = None
        if receiving is not None and receiving[0] == version:
            with _agreed():
                receiving[1].result()
        elif update_info.background and _all(subscriber.version >= 0):
            self._receiving = version, self._thread.submit(self._receive, update_info)
            return
        else:  # the first, above all: the model's loader is recorded, and the model must not run meanwhile
            self._may_load = True
            try:
                with _agreed():
                    self._receive(update_info)
            finally:
                self._may_load = False
        self._landed = version

    def finish_weight_update(self) -> None:
        """Install what has landed.

        Raises:
            ConfigError: nothing has landed since `start_weight_update`; nothing was touched.
            Exception: vLLM's own, of its post-processing; the model is of no version, and must not serve.
        """
        subscriber, staging = self._parts()
        if self._landed is None:
            raise ConfigError("no version has landed since the update was started", hint="call /update_weights")
        began = time.monotonic()
        with _agreed():
            staging.install(subscriber.wanted)
        took_s = time.monotonic() - began
        _logger.info("penstock: version %d of %s installed in %.3f s", self._landed, subscriber.name, took_s)

    def shutdown(self) -> None:
        """Unsubscribe; the model keeps its version."""
        if self._joined is not None:
            subscriber, _ = self._joined
            subscriber.close()
        if self._receiving is not None:
            wait([self._receiving[1]])
        self._joined = self._receiving = self._landed = None

    def _parts(self) -> tuple[Any, StagingModel]:
        if self._joined is None:
            raise ConfigError("this worker is subscribed to nothing", hint="call /init_weight_transfer_engine")
        return self._joined

    def _receive(self, info: UpdateInfo) -> None:
        subscriber, staging = self._parts()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if subscriber.version != info.version or subscriber.is_dirty:
            report = subscriber.update(info.version, timeout_s=info.timeout_s)
            _logger.info("penstock: %s", report.summary())
        staging.check(subscriber.wanted, strict=self._strict)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Return the model's loader, which may run only while vLLM waits for this worker."""
        _, staging = self._parts()
        if not self._may_load:
            raise ConfigError(
                "the model's loader is needed: it is another checkpoint, or one that cannot be recorded",
                hint="receive this version without 'background'",
            )
        return staging.load_weights(weights)


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """What is done inside is done by all workers of this engine, or all raise: vLLM's calls then end alike on all.

    Raises:
        PeerLost: another worker failed, and this one did not; says why.
    """
    why = ""
    try:
        yield
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        told = _told(why)
        if not why and (others := [f"worker {rank}: {one}" for rank, one in enumerate(told) if one]):
            raise PeerLost("; ".join(others))


def _all(is_so: bool) -> bool:
    """Return whether it is so on all workers of this engine."""
    return not any(_told("" if is_so else "no"))


def _told(mine: str) -> list[str]:
    """Return what all workers of this engine say, tensor-parallel ranks of one pipeline stage after the other."""
    from vllm.distributed import get_pp_group, get_tp_group

    text = mine.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
    told = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            parts = [torch.empty_like(told) for _ in range(group.world_size)]
            torch.distributed.all_gather(parts, told, group=group.cpu_group)
            told = torch.cat(parts)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in told.tolist()]


def _rank_of(parallel: Any) -> tuple[int, int]:
    """This worker among those of one engine, its data-parallel replicas included; how many they are."""
    return (
        parallel.data_parallel_index * parallel.world_size + parallel.rank,
        parallel.data_parallel_size * parallel.world_size,
    )


def _listen(place: str | None, rank: int) -> str | None:
    """Each worker's own port, from the first worker's on."""
    if place is None:
        return None
    host, _, port = place.rpartition(":")
    return f"{host}:{int(port) + rank if int(port) else 0}"
