"""The weight cache holds models in memory for the engines on its host, which map them without a copy.

The caller's thread keeps and drops models. Server threads, the heartbeat and an executor call private methods.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import TracebackType

import torch
from msgspec.structs import replace

from penstock.cache.engine_parameters import ACCEPTS, HANDLER, HandOver, HandOverHandler
from penstock.cache.resident_model import ConvertedModel, ResidentModel, ResidentState
from penstock.cache.tier_disk import SpillTier
from penstock.config import ConnectionSettings, Settings, parse_bytes
from penstock.engine.place import CudaRegistrar
from penstock.errors import (
    BudgetTooSmall,
    ConfigError,
    IntegrityError,
    NotFound,
    PenstockError,
    SourceBusy,
    SourceUnavailable,
)
from penstock.fetcher.join import Fleet
from penstock.fetcher.report import FetchReport
from penstock.holding.placement import device_id
from penstock.holding.weight_layout import revision_of
from penstock.hub.client import TIMEOUT_S, HubClient, resolve_connection
from penstock.hub.messages import Identity
from penstock.lifecycle import is_ending
from penstock.loader.progress import ProgressOption
from penstock.loader.session import resolve_device
from penstock.loader.verify import inspect
from penstock.logs import log_named
from penstock.memory.arena import needed_bytes
from penstock.memory.tier import TiersStats
from penstock.memory.tier_cuda import CudaTier
from penstock.memory.tier_host import ArenaTier, PoolTier
from penstock.memory.tiers import Level, Tiers
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.storage.weight_set import Uris
from penstock.telemetry.metrics import Sample, watch
from penstock.timing import Timing
from penstock.types import Manifest
from penstock.waits import until_stopped

log = log_named("penstock.fleet")


class CacheState(Enum):
    """The lifecycle of a cache."""

    NEW = auto()
    SERVING = auto()
    LEAVING = auto()
    """The cache grants no new leases and waits for engines and readers. A second `leave` continues the wait."""
    LEFT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentStatus:
    """The state of a cached model."""

    model: str
    key: str
    revision: str
    """The `w1-` root of the model's digests."""
    nbytes: int
    """Bytes of memory, including gaps between tensors."""
    device: str
    num_attached: int
    """Number of engines that map the model."""
    tier: str
    """`gpu` or `host` while the model is on its device. For a model that was moved, its lower tier: `host`, `disk` or
    `source`."""
    state: ResidentState = ResidentState.KEPT
    why: str = ""
    """Describes memory corruption and the result of the reload."""
    num_reloads: int = 0
    """Number of reloads caused by memory corruption."""


class WeightCache:
    """Keeps models in memory until `drop` or `leave`. Only one thread at a time may use the cache.

    All I/O begins in `open`, which the `with` statement calls.

    Attributes:
        tiers: the memory of all models. Available after `open`.
        member: the fleet membership that serves the models. Available after `open`.

    Args:
        device: device for all models. `"cpu"` means shared memory on this host.
        memory_bytes: limit in bytes for all models on the device in total. The default is the device's memory.
        host_bytes: bytes of host memory for idle GPU models. `open` allocates and pins this memory.
        disk: directory for idle models on a local disk.
        disk_bytes: limit for the directory in bytes. The default is the disk's free space.
        connection, max_bytes_per_s: see `penstock.join`.
        max_readers: maximum number of concurrent readers of each model.
        settings: settings for reading storage.
        accept: whether to keep processed parameters from engines on this host (`cache_parameters`) too.

    Raises:
        ConfigError: the limits for idle models contradict each other.
    """

    def __init__(
        self,
        *,
        device: str | int | torch.device = "cpu",
        memory_bytes: int | str | None = None,
        host_bytes: int | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | str | None = None,
        connection: ConnectionSettings | str | None = None,
        max_readers: int = 4,
        max_bytes_per_s: int | str = 0,
        settings: Settings | None = None,
        accept: bool = False,
    ) -> None:
        self._connection = resolve_connection(connection)
        self.device = resolve_device(device)
        self._settings = Settings.read() if settings is None else settings
        if self._connection.stall_s is not None:
            self._settings = replace(self._settings, stall_s=self._connection.stall_s)
        self._timing = Timing()
        self._max_readers = max_readers
        self._max_bytes_per_s = parse_bytes(max_bytes_per_s)
        self._accept = accept
        self.state = CacheState.NEW
        self._models: dict[str, ResidentModel] = {}
        self._stopped = threading.Event()
        self._adding = threading.Lock()
        self._handed_over: HandOverHandler | None = None
        # Run one reload at a time, because concurrent reloads would compete for memory and for one link.
        self._reloads = ThreadPoolExecutor(1, thread_name_prefix="penstock-reload")
        self._moves_idle = host_bytes is not None or disk is not None
        if self._moves_idle and memory_bytes is None:
            message = "host_bytes and disk require memory_bytes, because idle models only move when the device is full"
            raise ConfigError(message, hint="pass memory_bytes=")
        if disk_bytes is not None and disk is None:
            raise ConfigError("disk_bytes requires disk", hint="pass a directory as disk=")
        self._disk = disk
        self._bounds = [
            None if limit is None else parse_bytes(limit) for limit in (memory_bytes, host_bytes, disk_bytes)
        ]
        self._tiers: Tiers | None = None
        self._member: Member | None = None
        if host_bytes is not None and self.device.type == "cpu":
            message = "host_bytes requires models on a GPU, but this weight cache's models are in host memory"
            raise ConfigError(message, hint="limit host memory with memory_bytes")

    @property
    def tiers(self) -> Tiers:
        """Return the memory tiers that hold the models. Raise ConfigError if the cache is not open."""
        if self._tiers is None:
            raise _not_open()
        return self._tiers

    @property
    def member(self) -> Member:
        """Return this process's fleet membership. Raise ConfigError if the cache is not open."""
        if self._member is None:
            raise _not_open()
        return self._member

    def open(self) -> WeightCache:
        """Allocate memory for idle models, join the fleet, start to serve, and return this object. `with` calls `open`.

        Raises:
            BudgetTooSmall: `host_bytes` is too small.
            ConfigError: `disk` cannot be used, or this cache was opened before. See also `penstock.join`.
            HubUnavailable: this host's hub cannot be started. If a remote hub does not respond, the cache joins later.
            MissingExtra: see `penstock.join`.
        """
        self._require_new()
        stall_s, connection = self._settings.stall_s, self._connection
        tiers = Tiers(self._levels(), stall_s=stall_s)
        try:
            member = Member.join(
                # A request to the hub must time out well before the stall deadline.
                HubClient.connect(connection.hub, connection.token, timeout_s=min(TIMEOUT_S, stall_s / 3)),
                connection,
                max_bytes_per_s=self._max_bytes_per_s,
                stall_s=stall_s,
                # A hub is not needed, because every model can be read from storage.
                needs_hub=False,
            )
        except BaseException:
            # Pinned host memory and the directory on disk must not outlive a cache that could not be opened.
            tiers.close()
            raise
        return self.start(tiers, member)

    def _levels(self) -> list[Level]:
        memory_bytes, host_bytes, disk_bytes = self._bounds
        stall_s = self._settings.stall_s
        # Create the disk tier first, because it checks its directory, and pinning host memory takes seconds.
        below = []
        if self._disk is not None:
            below.append(Level(tier=SpillTier.open(self._disk), budget_bytes=disk_bytes, budget="disk_bytes"))
        if self.device.type == "cpu":
            return [Level(tier=ArenaTier(), budget_bytes=memory_bytes), *below]
        levels = [Level(tier=CudaTier(self.device, stall_s=stall_s), budget_bytes=memory_bytes)]
        if host_bytes is not None:
            pool = PoolTier.open(host_bytes, registrar=CudaRegistrar(self.device), stall_s=stall_s)
            # A model that returns to the device also stays in this pool, so that its next eviction copies nothing.
            levels.append(Level(tier=pool, budget_bytes=host_bytes, keeps_copies=True, budget="host_bytes"))
        return [*levels, *below]

    def start(self, tiers: Tiers, member: Member, timing: Timing | None = None) -> WeightCache:
        """Serve with the given tiers and membership. When the cache leaves, both are closed. See `open`."""
        self._require_new()
        self.state = CacheState.SERVING
        self._timing = timing or self._timing
        self._tiers, self._member = tiers, member
        member.server.recall = self._recalled
        member.on_damaged = self._damaged
        if self._accept:
            self._handed_over = HandOverHandler(self._accept_parameters, self._reloads)
            member.server.handlers[HANDLER] = self._handed_over
            socket = Path(member.server.addresses[0].removeprefix("unix://"))
            # Create this file last, because engines find the cache by this file.
            socket.with_name(ACCEPTS).write_text(device_id(self.device), encoding="utf-8")
        watch(self)
        return self

    def _require_new(self) -> None:
        if self.state is not CacheState.NEW:
            raise ConfigError("this weight cache was already opened", hint="create another WeightCache")

    def keep(
        self,
        model: str,
        uri: Uris,
        *,
        storage_options: Mapping[str, str] | None = None,
        progress: ProgressOption = None,
    ) -> FetchReport:
        """Fetch a model from members that hold it, and the missing bytes from storage. Serve the model until `drop`.

        Args:
            model: the name that engines pass to `attach`.
            uri, storage_options: see `load`.
            progress: called with the number of verified bytes. See `load`.

        Raises:
            BudgetTooSmall: `memory_bytes` is too small for this model and the models in use. Nothing was fetched.
            ConfigError: this revision of the model is already kept.
            PenstockError: see `Fleet.fetch`. An error does not affect other models.
        """
        report = inspect(uri, storage_options=storage_options)
        revision = revision_of(report.manifest)
        if any(
            (resident.name, resident.served.identity.revision) == (model, revision)
            for resident in self._models.values()
        ):
            hint = "use a different name, or drop the kept model first"
            raise ConfigError(f"{model!r} is already kept in this revision", uri=report.uri, hint=hint)
        # Any tensor may be placed last, and its padding needs memory. The empty tensor adds this padding.
        nbytes = needed_bytes([*report.manifest.tensors.nbytes.tolist(), 0])
        fleet = self._fleet(Identity(model=model))
        resident = ResidentModel(fleet, revision, nbytes, uri, storage_options, progress)
        self._add(resident, again=self._moves_idle)
        assert resident.report is not None
        return resident.report

    def _fleet(self, identity: Identity) -> Fleet:
        return Fleet(identity, self.member, self._settings, max_readers=self._max_readers)

    def _add(self, resident: ResidentModel, *, again: bool) -> None:
        with self._adding:
            self.tiers.put(resident.block, resident.fill, again=again, user=resident)
            self._models[resident.served.key] = resident
        self.member.report_now()

    def _accept_parameters(self, wanted: HandOver) -> None:
        for kept in list(self._models.values()):
            identity = kept.served.identity
            if (identity.model, identity.parallel) == (wanted.model, wanted.parallel):
                if kept.served.verified.root() == wanted.revision:
                    return
                hint = "two engines used one name for different parameters: rename the parameters or drop the kept ones"
                raise ConfigError(f"{wanted.model!r} is already kept with different bytes", hint=hint)
        fleet = self._fleet(Identity(model=wanted.model, revision=wanted.revision, parallel=wanted.parallel))
        resident = ResidentModel(fleet, wanted.revision, wanted.nbytes)
        self._add(resident, again=False)
        log.info("keeping %s from an engine: %d bytes", wanted.model, wanted.nbytes)

    def into(self, model: str) -> CacheDestination:
        """Return a destination for `convert` that writes the result into this cache's memory and keeps it.

        A failed conversion leaves nothing in memory.

        Raises:
            ConfigError: the model's name is empty, or this cache's memory is on a device.
        """
        if not model:
            raise ConfigError("the name of the model is empty")
        if self.device.type != "cpu":
            raise ConfigError(f"a conversion writes to host memory and not to {self.device}", hint="pass device='cpu'")
        return CacheDestination(self, model)

    def _convert(self, model: str, key: str, nbytes: int, fill: Callable[[Path], Manifest]) -> None:
        resident = ConvertedModel(self._fleet(Identity(model=model)), key, nbytes, fill, max_readers=self._max_readers)
        if any(other.block == resident.block for other in self._models.values()):
            raise ConfigError(f"{model!r} is already kept from the same conversion")
        self._add(resident, again=False)

    def models(self) -> list[ResidentStatus]:
        """Return the state of every kept model, in the order of `keep`."""
        models = list(self._models.items())
        tiers = self.tiers.where(resident.block for _, resident in models)
        return [
            ResidentStatus(
                model=resident.name,
                key=key,
                revision=resident.served.verified.root(),
                nbytes=resident.nbytes,
                device=str(resident.served.device),
                num_attached=self.member.server.num_attached(key),
                tier=tier or "",
                state=resident.state,
                why=resident.why,
                num_reloads=resident.num_reloads,
            )
            for (key, resident), tier in zip(models, tiers, strict=True)
        ]

    def stats(self) -> TiersStats:
        """Return the contents of the memory tiers, and the number of bytes moved between tiers so far."""
        return self.tiers.stats()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this cache. The metrics endpoint's thread calls this function."""
        stats = self.stats()
        for tier, use in stats.tiers.items():
            yield "penstock_tier_models", (tier,), use.num_blocks
            yield "penstock_tier_used_bytes", (tier,), use.used_bytes
            if use.budget_bytes is not None:
                yield "penstock_tier_limit_bytes", (tier,), use.budget_bytes
        for link, moves in stats.links.items():
            yield "penstock_tier_moved_bytes", link, moves.nbytes
        yield "penstock_tier_requests", ("hit",), stats.hits
        yield "penstock_tier_requests", ("miss",), stats.misses

    @contextmanager
    def _recalled(self, key: str) -> Iterator[str]:
        """Bring a model back and pin it. Raise NotFound for a lost model, or SourceUnavailable if no memory is free."""
        resident = self._models.get(key)
        if resident is None or resident.is_leaving:
            yield ""
            return
        if resident.reloaded is not None and not wait([resident.reloaded], timeout=self._timing.recall_wait_s).done:
            yield f"{resident.why}, and it is being loaded again"
            return
        if resident.state is ResidentState.LOST:
            # Do not report this member as busy, because its readers would then wait forever.
            raise NotFound(resident.why, hint="start the weight cache again, or drop the model")
        try:
            # The lease request must be answered before its reader considers this member stalled.
            self.tiers.prefetch(resident.block).result(timeout=self._timing.recall_wait_s)
        except TimeoutError:
            yield f"{resident.name!r} is being brought back from {self.tiers.where([resident.block])[0]}"
        except BudgetTooSmall as error:
            # The engines determine when memory becomes free, so do not ask readers to wait.
            raise SourceUnavailable(f"{resident.name!r} cannot be brought back now: {error.message}") from error
        else:
            # Pin the model until the lease is granted, because another model could evict it before then.
            with self.tiers.pin(resident.block):
                yield ""

    def _damaged(self, weights: LocalWeights, error: IntegrityError) -> None:
        resident = self._models.get(weights.key)
        if resident is None or resident.weights is not weights:
            return
        if not resident.become(ResidentState.RELOADING, error.message):
            return
        # A RuntimeError means that the cache is leaving and its executor accepts no more work.
        with contextlib.suppress(RuntimeError):
            resident.reloaded = self._reloads.submit(self._reload, resident)

    def _reload(self, resident: ResidentModel) -> None:
        begun, damage = time.monotonic(), resident.why
        try:
            if not resident.can_reload:
                raise NotFound(
                    "the model was created in memory and has no source: convert it again or restart its engine"
                )
            if self.device.type != "cpu":
                # Host memory stays valid while an engine maps it, but freeing device memory would break engines.
                self.member.server.drain(resident.served.key, self._timing.cache_drain_s)
            # Discard copies in lower tiers too, because they may be copies of the corrupt bytes.
            self._once_idle(lambda: self.tiers.discard(resident.block))
            self.tiers.promote(resident.block)
        except BaseException as error:
            message = error.message if isinstance(error, PenstockError) else repr(error)
            if resident.become(ResidentState.LOST, f"{damage}, and it could not be loaded again: {message}"):
                log.error("%s", resident.why)
            raise
        resident.num_reloads += 1
        assert resident.report is not None
        why = f"{damage}, and it was loaded again and verified in {time.monotonic() - begun:.1f} s"
        fetch = resident.served.fetch
        fetch.why = "; ".join(filter(None, (why, fetch.why)))
        # Change the state last, because `_recalled` and `check` read it from other threads.
        resident.become(ResidentState.KEPT, why)
        log.warning("%s: %s", why, resident.report)
        self.member.beat_now()

    def check(self) -> None:
        """Raise IntegrityError if a model's memory was corrupted and the model could not be reloaded."""
        for resident in list(self._models.values()):
            if resident.state is ResidentState.LOST:
                uri = f"penstock:{resident.served.key}"
                raise IntegrityError(resident.why, uri=uri, hint="start the weight cache again")

    def drop(self, model: str, *, revision: str | None = None, drain_s: float = 30.0) -> None:
        """Drop a model: grant no new leases, wait for engines and readers, and free its memory.

        Args:
            revision: revision to drop. None means all revisions.
            drain_s: seconds to wait for engines and readers.

        Raises:
            NotFound: the model is not kept.
            SourceBusy: engines or readers still use the model after `drain_s`. The model stays in the cache.
        """
        keys = [kept.key for kept in self.models() if kept.model == model and revision in (None, kept.revision)]
        if not keys:
            what = "is not kept here" if revision is None else f"is not kept here in revision {revision}"
            raise NotFound(
                f"{model!r} {what}", hint="call WeightCache.models() to list the kept models and their revisions"
            )
        deadline = time.monotonic() + drain_s
        for key in keys:
            self._drop(key, max(0.0, deadline - time.monotonic()))
        # Views may be in reference cycles, and the memory is freed with its last view.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop(self, key: str, drain_s: float) -> None:
        begun, resident = time.monotonic(), self._models[key]
        if resident.reloaded is not None and not wait([resident.reloaded], timeout=drain_s).done:
            raise SourceBusy(f"{resident.name!r} is being loaded again", hint="increase drain_s")
        drain_s = max(0.0, drain_s - (time.monotonic() - begun))
        weights = resident.served
        before = resident.state
        # In the state DROPPING, no server thread brings the model back, and no thread reloads it.
        if not resident.become(ResidentState.DROPPING):
            raise SourceBusy(f"{resident.name!r} is {before}", hint="increase drain_s")
        weights.set_state("draining")
        self.member.beat_now()
        if remaining := self.member.server.drain(key, drain_s):
            attached = self.member.server.num_attached(key)
            weights.set_state("whole")
            resident.become(before)
            self.member.server.show(weights)
            self.member.beat_now()
            message = f"{attached} engines and {remaining - attached} readers still use {weights.identity.model!r}"
            raise SourceBusy(message, hint="stop the engines and readers, or increase drain_s")
        self.member.hide(weights, 0.0)
        self.member.report_now()
        resident.become(ResidentState.DROPPED)
        del self._models[key]
        if self._handed_over is not None:
            self._handed_over.forget(resident.name)
        self._once_idle(lambda: self.tiers.drop(resident.block))

    def _once_idle(self, act: Callable[[], None]) -> None:
        """Retry `act` while it raises SourceBusy because the block is being moved or is pinned."""
        deadline = time.monotonic() + self._settings.stall_s
        while True:
            try:
                act()
                return
            except SourceBusy:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(self._timing.tier_pause_s)

    def serve(
        self, *, drain_s: float = 30.0, timeout_s: float | None = None, ready: Callable[[], None] | None = None
    ) -> None:
        """Serve until `leave`, SIGTERM or SIGINT, then wait at most `drain_s` for engines and readers, and leave.

        Args:
            drain_s: seconds to wait for engines and readers. A second signal ends the wait.
            timeout_s: seconds after which `serve` returns, while the models stay in the cache. None means no limit.
            ready: called once, when the signal handlers are installed.

        Raises:
            IntegrityError: see `check`. The cache leaves the fleet before this error is raised.
        """
        try:
            if until_stopped(self._stopped, self.check, timeout_s, ready):
                self.leave(drain_s)
        except IntegrityError:
            self.leave(drain_s)
            raise

    def leave(self, drain_s: float = 30.0) -> None:
        """Grant no new leases, wait at most `drain_s` for engines and readers, and leave the fleet. Idempotent.

        Host memory that an engine has mapped stays valid while it is mapped, even after the cache's process exits.
        """
        self._stopped.set()
        if self.state in (CacheState.NEW, CacheState.LEFT):
            self.state = CacheState.LEFT
            return
        self.state = CacheState.LEAVING
        for resident in self._models.values():
            resident.become(ResidentState.DROPPED)
        if users := self._users():
            log.warning("waiting at most %.0f s for %s", drain_s, users)
        self.member.leave(drain_s)
        self._reloads.shutdown(cancel_futures=True)
        self._models.clear()
        self.tiers.close()
        self.state = CacheState.LEFT

    def _users(self) -> str:
        server = self.member.server
        num_attached = sum(map(server.num_attached, self._models))
        num_readers = sum(map(server.num_readers, self._models)) - num_attached
        counts = ((num_attached, "engine"), (num_readers, "reader"))
        return " and ".join(f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count)

    def __enter__(self) -> WeightCache:
        return self.open() if self.state is CacheState.NEW else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_ending():
            self.leave(self._timing.cache_drain_s if kind is None else 0.0)


class CacheDestination:
    """A destination of `penstock.convert` in a cache, created by `WeightCache.into`. Reports show `uri`."""

    def __init__(self, cache: WeightCache, model: str) -> None:
        self._cache = cache
        self._model = model
        self.uri = f"cache:{model}"

    def take(self, key: str, nbytes: int, fill: Callable[[Path], Manifest]) -> None:
        """Allocate memory, let a conversion write its result there, and serve the result.

        Args:
            key: key of the conversion. The same sources and operations produce the same key.
            nbytes: size of the result in bytes.
            fill: writes the tensors to a path as one file without a header, and returns their manifest with digests.

        Raises:
            BudgetTooSmall: the cache does not have enough memory.
            ConfigError: the result is already kept.
            PenstockError: errors of `fill`.
        """
        self._cache._convert(self._model, key, nbytes, fill)


def _not_open() -> ConfigError:
    return ConfigError("this cache is not open", hint="use `with WeightCache(...) as cache:`, or call open() first")
