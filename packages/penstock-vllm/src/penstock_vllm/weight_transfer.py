"""The worker's side of vLLM's weight transfer backend `penstock`: receive and install a trainer's versions.

vLLM's worker calls the engine of this module through the HTTP routes or `collective_rpc`. Each step succeeds or fails
on all workers of an engine (`_agreed`), because otherwise some workers would serve a different version than the rest.

This module imports vLLM, so only vLLM's registry imports this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

import torch

import penstock
from penstock.errors import ConfigError, NotFound, PeerLost
from penstock.spi import connection_of, reason_of, reasons_of
from penstock_vllm.plugin import (
    PLUGIN,
    PREFIX_CACHES,
    REPLIES,
    TRANSFER,
    rank_of_engine,
    refuse_unprotected_sleep,
    vllm_logger,
)
from penstock_vllm.staging import StagingModel, check_reload

try:
    from vllm.config import get_current_vllm_config, set_current_vllm_config
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
finally:
    # Raise ConfigError with the reason, also instead of an ImportError.
    PLUGIN.require(TRANSFER, feature=TRANSFER)

_RELOAD = "vLLM's reload of layers"
"""Part of the plugin that only engines with this backend register, because it imports many of vLLM's modules."""


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The body of `/init_weight_transfer_engine`: the sync to receive from, and how to receive."""

    name: str
    """Name of the sync."""
    hub: str | None = None
    token_file: str | None = None
    """Path of a file whose first token is sent to the hub."""
    listen: str | None = None
    """`host:port` at which other hosts reach the first worker. The other workers use the ports after it."""
    data_port: int = 0
    """Port of the first worker from which peers read bytes. The other workers use the ports after it. 0 means free
    ports."""
    memory: Literal["device", "host"] = "device"
    """Memory for the staging model. Choose "host" if the device has no space for the staging model."""
    strict: bool = True
    """Require that every parameter is published. If False, parameters that are not published keep their previous
    values."""
    serve: bool = True
    """Whether other subscribers may read versions from this worker."""
    memory_bytes: int | str | None = None
    stall_s: float | None = None
    prepare_s: float | None = 0.0
    """Maximum wait in seconds for the trainer's ranks, in order to prepare for the first version. None means no
    preparation."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"init_info 'name' must be a non-empty string, not {self.name!r}")
        if self.memory not in ("device", "host"):
            raise ConfigError(f"init_info 'memory' must be 'device' or 'host', not {self.memory!r}")
        if self.prepare_s is not None and not (isinstance(self.prepare_s, (int, float)) and self.prepare_s >= 0):
            raise ConfigError(f"init_info 'prepare_s' must be 0 or more seconds, or null, not {self.prepare_s!r}")


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The body of `/update_weights`."""

    version: int
    """Version to receive. There is no default, because all workers must receive the same version."""
    background: bool = False
    """Respond at once, and receive the version while the model serves. The same call without `background` waits until
    the version is received."""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 0:
            raise ConfigError(f"update_info 'version' must be an integer of 0 or more, not {self.version!r}")


class PenstockWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A worker's subscription to a sync, which vLLM creates after loading the model and calls from one thread.

    Attributes:
        installed: the version that was installed last, or -1.
        num_installed: number of versions that were installed.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *place: Any) -> None:
        """Check that the model's layout is stable, without I/O.

        Args:
            config: vLLM's configuration of weight transfers.
            place: vLLM's configuration, the device and the model. vLLM 0.24 passes a part of its configuration and the
                model.

        Raises:
            ConfigError: vLLM moves experts between ranks while the model serves, or Penstock cannot separate the
                requests and replies of different versions in this release of vLLM, or cannot reload its layers.
        """
        PLUGIN.register({_RELOAD: check_reload})
        for part in (PREFIX_CACHES, REPLIES, _RELOAD):
            PLUGIN.require(part, feature=TRANSFER)
        super().__init__(config, *place)
        if not hasattr(self, "vllm_config"):
            # `patches.run_updates_in_engine` sets the current configuration.
            self.vllm_config = get_current_vllm_config()
            self.device = next(self.model.parameters()).device
        vllm_config = self.vllm_config
        refuse_unprotected_sleep(vllm_config)
        if vllm_config.parallel_config.enable_eplb:
            raise ConfigError(
                "vLLM moves experts between ranks (EPLB), so the layout of the sync changes", hint="disable EPLB"
            )
        self._joined: tuple[Any, StagingModel] | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-receive")
        self._receiving: tuple[int, Future[None]] | None = None
        self._landed: int | None = None
        self._may_load = False
        self._strict = True
        self.installed = -1
        self.num_installed = 0
        self._left: list[torch.nn.Parameter] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe to a sync, and leave the previous sync.

        Raises:
            ConfigError, HubUnavailable: see `penstock.subscriber`.
            DeviceOutOfMemory, DestinationError: there is not enough memory for a staging model.
            PlanError: names, dtypes or shapes differ between the trainer and the engine. See `Subscriber.prepare`.
        """
        self.shutdown()
        device = self.device if init_info.memory == "device" else torch.device("cpu")
        rank, world_size = rank_of_engine()
        with contextlib.ExitStack() as stack:
            with _agreed():
                staging = StagingModel(self.model, self.vllm_config, device)
                subscriber = penstock.subscriber(
                    init_info.name,
                    staging,
                    connection=connection_of(vars(init_info) | _ports(init_info, self.parallel_config)),
                    # Receive directly into the staging model. The serving model changes only with a complete version.
                    mode="direct",
                    load=self._load,
                    # `StagingModel.check` checks instead that no parameter is missing, because attention has parameters
                    # that no checkpoint fills.
                    strict=False,
                    rank=(rank, world_size),
                    settings=penstock.sync.SubscriberSettings(
                        serve=init_info.serve, memory_bytes=init_info.memory_bytes
                    ),
                )
                stack.callback(subscriber.close)
            self._joined, self._left = (subscriber, staging), None
            stack.callback(setattr, self, "_joined", None)
            if init_info.prepare_s is not None:
                with _agreed(), self._loading():
                    is_prepared = subscriber.prepare(init_info.prepare_s)
                    vllm_logger().info("penstock: %s is %sprepared", init_info.name, "" if is_prepared else "not yet ")
            # This line is outside `_agreed`, because this worker must leave the sync even if only another worker
            # failed.
            stack.pop_all()
        self._strict = init_info.strict
        vllm_logger().info("penstock: rank %d of %d subscribes to %s", rank, world_size, init_info.name)

    def start_weight_update(self) -> None:
        """Begin an update. The model stays unchanged and may serve until `finish_weight_update`."""
        self._parts()
        self._landed = None

    def receive_weights(self, update_info: UpdateInfo, load_weights: object = None) -> None:
        """Receive a version into the staging model, on all workers of the engine or on none.

        Args:
            update_info: the version, and how to receive it.
            load_weights: vLLM 0.24 passes a function that changes the serving model. It is not called.

        Raises:
            ConfigError: a different version is being received.
            PenstockError: see `penstock.sync.Subscriber.update`. On failure, the model keeps the previous version.
        """
        subscriber, _ = self._parts()
        version = update_info.version
        receiving = self._receiving
        if receiving is not None:
            running, done = receiving
            # No worker may continue while another worker's background thread is still receiving.
            if running != version and not _all(done.done()):
                raise ConfigError(
                    f"version {running} is being received", hint="call /update_weights, which waits for this version"
                )
            if running == version and update_info.background:
                return
            self._receiving = None
        if receiving is not None and receiving[0] == version:
            with _agreed():
                receiving[1].result()
        elif update_info.background and _all(subscriber.wanted is not None):
            # A background thread must not run the model's loader in order to record it.
            self._receiving = version, self._thread.submit(self._receive, update_info)
            return
        else:
            # Receiving the first version without preparation runs the model's loader in order to record it. The model
            # must not run at that time, and it does not, because vLLM waits for this call.
            with self._loading(), _agreed():
                self._receive(update_info)
        self._landed = version

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Refuse, because this is the trainer's interface of vLLM 0.24 and 0.25, in which a trainer sends tensors."""
        raise ConfigError("Penstock's trainers publish versions", hint="use penstock.publisher, and call vLLM's routes")

    def finish_weight_update(self) -> None:
        """Install the received version into the model.

        Raises:
            ConfigError: no version was received since `start_weight_update`. The model is unchanged.
            Exception: vLLM's post-processing failed, so the model has no complete version and must not serve.
        """
        subscriber, staging = self._parts()
        if self._landed is None:
            raise ConfigError("no version was received since the update started", hint="call /update_weights")
        self._install(subscriber, staging, self._landed)

    def _install(self, subscriber: Any, staging: StagingModel, version: int) -> None:
        began = time.monotonic()
        # Before vLLM 0.27, workers do not set the configuration, which a layer's post-processing reads.
        with set_current_vllm_config(self.vllm_config), _agreed():
            staging.install(subscriber.wanted)
        # A sleep releases the subscriber, which then no longer knows what it fills.
        self._left = staging.not_installed(subscriber.wanted)
        self.installed = version
        self.num_installed += 1
        took_s = time.monotonic() - began
        vllm_logger().info("penstock: version %d of %s installed in %.3f s", version, subscriber.name, took_s)

    def fall_asleep(self) -> None:
        """Free the staging model if it is in device memory."""
        if self._joined is None:
            return
        subscriber, staging = self._joined
        if self._receiving is not None:
            # Wait for the thread, because it writes to the staging model. A failure of the thread does not matter,
            # because the version is read again.
            wait([self._receiving[1]])
            self._receiving = None
        self._landed = None
        # Keep a staging model in host memory, because other subscribers read from it.
        if staging.device.type != self.device.type or subscriber.is_released:
            return
        # A subscriber that was only prepared has also registered the memory, so let the subscriber free the memory.
        if subscriber.wanted is not None:
            freed = subscriber.release()
            vllm_logger().info("penstock: asleep, %d bytes of %s freed", freed, subscriber.name)
        else:
            staging.free()

    def not_installed(self) -> list[torch.nn.Parameter]:
        """Return the parameters that no version of the sync fills, and that a sleep may lose."""
        if self._joined is None:
            return []
        subscriber, staging = self._joined
        if subscriber.wanted is not None:
            self._left = staging.not_installed(subscriber.wanted)
        if self._left is None:
            # The versions of the sync are not known yet. With `strict` they fill everything.
            return [] if self._strict else list(self.model.parameters())
        return self._left

    def all_agree(self, is_so: bool) -> bool:
        """Return whether a condition holds on all workers of this engine. Collective."""
        return _all(is_so)

    def bring_back(self) -> None:
        """Receive the newest version into the staging model and install it. Collective.

        Raises:
            ConfigError: the worker is not subscribed to a sync.
            PenstockError: no member has a version. Call this again later.
        """
        with _agreed():
            subscriber, staging = self._parts()
        # All workers must receive the same version, although each worker may know of a different newest version.
        known = max(subscriber.announced(), subscriber.version)
        version = max(int(text) for text in _gathered(str(known)))
        if version < 0:
            raise NotFound(
                f"no version of {subscriber.name!r} is announced", hint="start the trainer, and call /wake_up again"
            )
        with _agreed():
            self._receive(UpdateInfo(version=version))
        self._install(subscriber, staging, version)

    def shutdown(self) -> None:
        """Unsubscribe. The model keeps the version that it serves."""
        if self._joined is not None:
            subscriber, _ = self._joined
            subscriber.close()
        # Closing the subscriber aborts a receive in the background. The receiving thread uses the staging model until
        # it exits.
        if self._receiving is not None:
            wait([self._receiving[1]])
        self._joined = self._receiving = self._landed = None

    def _parts(self) -> tuple[Any, StagingModel]:
        if self._joined is None:
            raise ConfigError("this worker has not subscribed to a sync", hint="call /init_weight_transfer_engine")
        return self._joined

    def _receive(self, info: UpdateInfo) -> None:
        subscriber, staging = self._parts()
        # Set the device, because the current device is set per thread, and `_receive` may run in the background thread.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # The subscriber may already have the version if the call is repeated or the staging model stayed in host
        # memory.
        if subscriber.version != info.version or subscriber.is_dirty:
            staging.allocate()
            receive = subscriber.restore if subscriber.is_released else subscriber.update
            report = receive(info.version, timeout_s=info.timeout_s)
            vllm_logger().info("penstock: %s", report.summary())
        staging.check(subscriber.wanted, strict=self._strict)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Allow the model's loader to run inside a block during which vLLM waits for this worker."""
        self._may_load = True
        try:
            yield
        finally:
            self._may_load = False

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's loader.

        The model must not run at the same time, so loading is allowed only while vLLM waits for this worker.
        """
        _, staging = self._parts()
        if not self._may_load:
            raise ConfigError(
                "the model's loader has to run, because the checkpoint changed or cannot be recorded",
                hint="receive this version without 'background'",
            )
        return staging.load_weights(weights)


_AGREE_S = 600.0
"""Seconds that a worker waits for the others, which may still receive. Source: the timeout of NCCL's groups."""


@contextlib.contextmanager
def _agreed() -> Iterator[None]:
    """Run a block that succeeds on all workers of this engine or raises on all of them. Collective.

    A worker that did not fail raises PeerLost with the other workers' reasons.
    """
    why = ""
    try:
        yield
    except BaseException as error:
        why = reason_of(error)
        raise
    finally:
        # A failed worker must also take part in the collective, because the other workers wait for it.
        reasons = _gathered(why)
        if not why and (others := [f"worker {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]):
            raise PeerLost("; ".join(others))


def _all(is_so: bool) -> bool:
    """Return whether a condition holds on all workers of this engine. Collective."""
    return not any(_gathered("" if is_so else "no"))


def _gathered(mine: str) -> list[str]:
    """Return all workers' texts, ordered by pipeline stage and then by tensor-parallel rank. Collective."""
    from vllm.distributed import get_pp_group, get_tp_group

    # The device may have failed, so use the groups' CPU backends.
    groups = [group.cpu_group for group in (get_tp_group(), get_pp_group()) if group.world_size > 1]
    return reasons_of(groups, mine, stall_s=_AGREE_S)


def _ports(info: InitInfo, parallel: Any) -> dict[str, Any]:
    """Return this worker's ports, which are derived from the first worker's ports."""
    if info.listen is None:
        return {}
    host, _, port = info.listen.rpartition(":")
    return {"listen": f"{host}:{_port(int(port), parallel)}", "data_port": _port(info.data_port, parallel)}


def _port(first: int, parallel: Any) -> int:
    # Data-parallel replicas of a dense model all number their ranks from 0, so include the replica's index.
    return first + parallel.data_parallel_index * parallel.world_size + parallel.rank if first else 0
