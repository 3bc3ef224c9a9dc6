"""A keeper: holds models for the engines of its host, which map them without a copy, and outlives them.

In: weight sets by URI, on one device, within a bound. Out: whole holdings of the fleet that engines attach to; idle
ones make room for others, and come back when they are asked for.
Not here: what engines call (`attach`), moving the bytes (`fetch.join`, `fetch.run`), one model (`resident_model`),
`memory.tiers`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from penstock.arguments import require_connection
from penstock.config import Settings, parse_bytes
from penstock.engine.place_cuda import CudaRegistrar
from penstock.errors import BudgetTooSmall, ConfigError, IntegrityError, NotFound, PenstockError, SourceBusy
from penstock.fetch.join import Fleet
from penstock.fetch.report import FetchReport
from penstock.hub.client import HubClient
from penstock.hub.identity import Identity
from penstock.jobs.job import Job
from penstock.jobs.memory_destination import SCHEME, MemoryDestination
from penstock.keeper.resident_model import ConvertedModel, ResidentModel, ResidentState
from penstock.loader.session import resolve_device
from penstock.loader.verify import inspect
from penstock.memory.arena import needed_bytes
from penstock.memory.tier_cuda import CudaTier
from penstock.memory.tier_disk import SpillTier
from penstock.memory.tier_host import ArenaTier, PoolTier
from penstock.memory.tier_stats import TiersStats
from penstock.memory.tiers import Level, Tiers
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.peer.shutdown import until_stopped
from penstock.peer.weight_layout import revision_of
from penstock.storage.weight_set import Uris
from penstock.types import Manifest

log = logging.getLogger("penstock.fleet")

DRAIN_S = 30.0
"""How long engines and readers are waited for. An engine that was killed counts until its lease runs out, in 15 s."""
RECALL_S = 4.0
"""How long the door has an asker wait for a model that comes back, before it is told to ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentStatus:
    """One model that is kept."""

    model: str
    key: str
    revision: str
    """The `w1-` root of its digests."""
    nbytes: int
    """Of memory, gaps between tensors included."""
    device: str
    num_attached: int
    """Engines that use it."""
    tier: str
    """`gpu` or `host` on its device; where it rests else: `host`, `disk`, `source`."""
    state: ResidentState = "kept"
    """`reloading`: its memory was damaged, and it is read again; `lost`: that failed."""
    why: str = ""
    """What was damaged, and what became of it."""
    num_reloads: int = 0
    """How often it was read again because its memory was damaged."""


class Keeper:
    """Keeps models until `drop` or `leave`. A context manager, whose end is `leave`; one thread at a time calls it.

    Args:
        device: where all of them are kept: `"cpu"` is shared memory of this host.
        memory_bytes: bound of all of them together on the device; None: what the device has.
        host_bytes: pinned host memory for idle models of a GPU; it is pinned from now on.
        disk: directory for idle models, on a local disk.
        disk_bytes: bound of it; None: what the disk has.
        settings: of reading storage.
        hub, token, rack, listen, transports, max_readers, max_bytes_per_s: see `penstock.join`.

    Raises:
        ConfigError: idle models have nowhere to go, or no reason to. BudgetTooSmall: of `host_bytes`.
        HubUnavailable, ConfigError, MissingExtra: see `penstock.join`.
    """

    def __init__(
        self,
        *,
        device: str | int | torch.device = "cpu",
        memory_bytes: int | str | None = None,
        host_bytes: int | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | str | None = None,
        hub: str | None = None,
        token: str | None = None,
        rack: str = "",
        listen: str | None = None,
        transports: Sequence[str] | None = None,
        max_readers: int = 4,
        max_bytes_per_s: int | str = 0,
        settings: Settings | None = None,
    ) -> None:
        require_connection(hub, token, rack, listen, transports)
        self.device = resolve_device(device)
        self._settings = Settings.read() if settings is None else settings
        self._max_readers = max_readers
        self._kept: dict[str, ResidentModel] = {}
        self._stopped = threading.Event()
        self._reloads = ThreadPoolExecutor(1, thread_name_prefix="penstock-reload")
        self._moves_idle = host_bytes is not None or disk is not None
        if self._moves_idle and memory_bytes is None:
            raise ConfigError("idle models make room only within a bound", hint="give memory_bytes")
        if disk_bytes is not None and disk is None:
            raise ConfigError("a bound of no disk", hint="give disk, a directory")
        bounds = [None if one is None else parse_bytes(one) for one in (memory_bytes, host_bytes, disk_bytes)]
        levels = _levels(self.device, bounds[0], bounds[1], disk, bounds[2], self._settings)
        self.tiers = Tiers(levels, stall_s=self._settings.stall_s)
        try:
            self.member = Member(
                HubClient.connect(hub, token=token),
                rack=rack,
                listen=listen,
                transports=transports,
                max_bytes_per_s=parse_bytes(max_bytes_per_s),
                stall_s=self._settings.stall_s,
            )
        except BaseException:
            self.tiers.close()
            raise
        self.member.server.recall = self._recalled
        self.member.on_damaged = self._damaged

    def keep(self, model: str, uri: Uris, *, storage_options: Mapping[str, str] | None = None) -> FetchReport:
        """Fetch a model from members that have it, and from storage what they have not; keep it from then on.

        Args:
            model: the name that engines attach by.
            uri: where storage has it; see `load`.
            storage_options: see `load`.

        Raises:
            BudgetTooSmall: `memory_bytes` has no room for it beside what is kept, or in use; nothing was fetched.
            ConfigError: this revision of it is kept already.
            PenstockError: see `Fleet.fetch`; what was kept before is kept still.
        """
        found = inspect(uri, storage_options=storage_options)
        revision = revision_of(found.manifest)
        if any((one.name, one.shown.identity.revision) == (model, revision) for one in self._kept.values()):
            hint = "give it another name, or drop what is kept first"
            raise ConfigError(f"{model!r} is kept already, in this revision", uri=found.uri, hint=hint)
        nbytes = needed_bytes([*found.manifest.tensors.nbytes.tolist(), 0])  # whatever their order
        fleet = Fleet(Identity(model=model), self.member, self._settings, max_readers=self._max_readers)
        kept = ResidentModel(fleet, revision, nbytes, uri, storage_options)
        self.tiers.put(kept.block, kept.fill, again=self._moves_idle, tenant=kept)
        self._kept[kept.shown.key] = kept
        self.member.report_now()
        assert kept.report is not None
        return kept.report

    def into(self, model: str) -> MemoryDestination:
        """A destination for `convert`: the result is made in this keeper's memory, and kept from then on.

        It is never on a disk, unless it makes room for another model; nothing of it is left where the conversion fails.

        Raises:
            ConfigError: a model without a name; this keeper's memory is a device's.
        """
        if not model:
            raise ConfigError("a model needs a name")
        if self.device.type != "cpu":
            raise ConfigError(f"what is converted goes to host memory, not {self.device}", hint="device='cpu'")
        return _KeeperDestination(self, model)

    def _make(self, model: str, job: Job, fill: Callable[[Path], Manifest]) -> None:
        fleet = Fleet(Identity(model=model), self.member, self._settings, max_readers=self._max_readers)
        kept = ConvertedModel(fleet, job, fill, max_readers=self._max_readers)
        if any(one.block == kept.block for one in self._kept.values()):
            raise ConfigError(f"{model!r} is kept already, of this very conversion")
        self.tiers.put(kept.block, kept.fill, again=False, tenant=kept)
        self._kept[kept.shown.key] = kept
        self.member.report_now()

    def models(self) -> list[ResidentStatus]:
        """What is kept now, in the order it came."""
        kept = list(self._kept.items())
        return [
            ResidentStatus(
                model=one.name,
                key=key,
                revision=one.shown.root(),
                nbytes=one.nbytes,
                device=str(one.shown.device),
                num_attached=self.member.server.num_attached(key),
                tier=tier or "",
                state=one.state,
                why=one.why,
                num_reloads=one.num_reloads,
            )
            for (key, one), tier in zip(kept, self.tiers.where(one.block for _, one in kept), strict=True)
        ]

    def stats(self) -> TiersStats:
        """What is in which tier, and what moved between them so far."""
        return self.tiers.stats()

    @contextmanager
    def _recalled(self, key: str) -> Iterator[str]:
        """See `Recall`. SourceBusy: there is no room beside models that are in use."""
        kept = self._kept.get(key)
        if kept is None or kept.is_leaving:
            yield ""
            return
        if kept.reloaded is not None and not wait([kept.reloaded], timeout=RECALL_S).done:
            yield f"{kept.why}; it is being loaded again"
            return
        if kept.state == "lost":
            raise SourceBusy(kept.why)
        try:
            self.tiers.prefetch(kept.block).result(timeout=RECALL_S)
        except NotYet:
            yield f"{kept.name!r} is being brought back from {self.tiers.where([kept.block])[0]}"
        except BudgetTooSmall as error:
            raise SourceBusy(f"{kept.name!r} cannot be brought back now: {error.message}") from error
        else:
            with self.tiers.pin(kept.block):
                yield ""

    # -- memory that is damaged

    def _damaged(self, weights: LocalWeights, error: IntegrityError) -> None:
        """Have a model whose memory changed loaded again, by a thread of its own; the other models stay served."""
        kept = self._kept.get(weights.key)
        if kept is None or kept.is_leaving or kept.weights is not weights:
            return
        kept.state, kept.why = "reloading", error.message
        with contextlib.suppress(RuntimeError):  # the keeper is leaving
            kept.reloaded = self._reloads.submit(self._reload, kept)

    def _reload(self, kept: ResidentModel) -> None:
        """Give the memory up, and read the model again from members or its source, verified; else it is lost."""
        begun, damage = time.monotonic(), kept.why
        try:
            if not kept.can_reload:
                raise NotFound("a conversion made it here: there is no source to read it from again")
            if self.device.type != "cpu":
                # Host memory stays as long as an engine maps it; a device's is freed under engines that still use it.
                self.member.server.drain(kept.shown.key, DRAIN_S)
            self._once_idle(lambda: self.tiers.discard(kept.block))
            self.tiers.promote(kept.block)
        except BaseException as error:
            message = error.message if isinstance(error, PenstockError) else repr(error)
            kept.why, kept.state = f"{damage}, and it could not be loaded again: {message}", "lost"
            if not kept.is_leaving:
                log.error("%s", kept.why)
            raise
        kept.num_reloads += 1
        assert kept.report is not None
        kept.why = f"{damage}; loaded again and verified in {time.monotonic() - begun:.1f} s"
        kept.shown.why = "; ".join(filter(None, (kept.why, kept.shown.why)))
        kept.state = "kept"
        log.warning("%s: %s", kept.why, kept.report.summary())
        self.member.beat_now()

    def check(self) -> None:
        """Raise unless every model is kept, or on its way back.

        Raises:
            IntegrityError: a model's memory was damaged, and it could not be loaded again; says why not.
        """
        for kept in list(self._kept.values()):
            if kept.state == "lost":
                raise IntegrityError(kept.why, uri=f"penstock:{kept.shown.key}", hint="start the keeper again")

    def drop(self, model: str, *, revision: str | None = None, drain_s: float = DRAIN_S) -> None:
        """Keep a model no more: let nobody new in, wait for engines and readers, free its memory.

        Args:
            model: all revisions of it, or `revision` alone.
            drain_s: how long to wait.

        Raises:
            NotFound: it is not kept.
            SourceBusy: engines or readers are still there after `drain_s`; it is kept as before.
        """
        keys = [one.key for one in self.models() if one.model == model and revision in (None, one.revision)]
        if not keys:
            what = "is not kept here" if revision is None else f"is not kept here in revision {revision}"
            raise NotFound(f"{model!r} {what}", hint="Keeper.models() says what is, and in which revision")
        deadline = time.monotonic() + drain_s
        for key in keys:
            self._drop(key, max(0.0, deadline - time.monotonic()))
        gc.collect()  # memory is given back when the last view of it is gone
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop(self, key: str, drain_s: float) -> None:
        kept = self._kept[key]
        begun = time.monotonic()
        if kept.reloaded is not None and not wait([kept.reloaded], timeout=drain_s).done:
            raise SourceBusy(f"{kept.name!r} is being loaded again", hint="wait longer: drain_s")
        drain_s = max(0.0, drain_s - (time.monotonic() - begun))
        weights, kept.is_leaving = kept.shown, True
        weights.set_state("draining")
        self.member.beat_now()
        left = self.member.server.drain(key, drain_s)
        if left:
            attached = self.member.server.num_attached(key)
            weights.set_state("whole")
            kept.is_leaving = False
            self.member.server.show(weights)
            self.member.beat_now()
            message = f"{attached} engines and {left - attached} readers still use {weights.identity.model!r}"
            raise SourceBusy(message, hint="stop them, or wait longer: drain_s")
        self.member.hide(weights, 0.0)
        self.member.report_now()
        del self._kept[key]
        self._once_idle(lambda: self.tiers.drop(kept.block))

    def _once_idle(self, act: Callable[[], None]) -> None:
        """Do something to a block's rooms; a move of it under way, or a pin, is waited for."""
        deadline = time.monotonic() + self._settings.stall_s
        while True:
            try:
                act()
                return
            except SourceBusy:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.02)

    def serve(self, *, drain_s: float = DRAIN_S, timeout_s: float | None = None) -> None:
        """Keep until `leave`, SIGTERM or SIGINT; then wait for engines and readers at most `drain_s`, and leave.

        Args:
            drain_s: of the end; a second signal does not wait.
            timeout_s: return after this long, still keeping; None: no bound.

        Raises:
            IntegrityError: see `check`; engines and readers of the other models were waited for, and this keeper left.
        """
        try:
            if until_stopped(self._stopped, self.check, timeout_s):
                self.leave(drain_s)
        except IntegrityError:
            self.leave(drain_s)
            raise

    def leave(self, drain_s: float = DRAIN_S) -> None:
        """Let nobody new in, wait for engines and readers at most `drain_s`, say good-bye. Idempotent.

        Host memory that an engine has mapped stays its own for as long as it is mapped, whatever becomes of the keeper.
        """
        self._stopped.set()
        for kept in self._kept.values():
            kept.is_leaving = True
        self.member.leave(drain_s)
        self._reloads.shutdown(cancel_futures=True)  # one under way has the deadlines of a fetch
        self._kept.clear()
        self.tiers.close()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(DRAIN_S if kind is None else 0.0)


class _KeeperDestination:
    """See `MemoryDestination`."""

    def __init__(self, keeper: Keeper, model: str) -> None:
        self._keeper, self._model, self.uri = keeper, model, f"{SCHEME}{model}"

    def take(self, job: Job, fill: Callable[[Path], Manifest]) -> None:
        """See `MemoryDestination.take`."""
        self._keeper._make(self._model, job, fill)


def _levels(
    device: torch.device,
    memory_bytes: int | None,
    host_bytes: int | None,
    disk: str | os.PathLike[str] | None,
    disk_bytes: int | None,
    settings: Settings,
) -> list[Level]:
    """The device, pinned host memory of a GPU, the disk. Checked before anything is allocated."""
    levels, below = [], []
    if disk is not None:
        below.append(Level(tier=SpillTier(disk, settings=settings), budget_bytes=disk_bytes))
    if device.type == "cpu":
        if host_bytes is not None:
            raise ConfigError("models that are kept in host memory are there", hint="it is bounded by memory_bytes")
        levels.append(Level(tier=ArenaTier(), budget_bytes=memory_bytes))
    else:
        levels.append(Level(tier=CudaTier(device, stall_s=settings.stall_s), budget_bytes=memory_bytes))
        if host_bytes is not None:
            pool = PoolTier(host_bytes, registrar=CudaRegistrar(device), stall_s=settings.stall_s)
            levels.append(Level(tier=pool, budget_bytes=host_bytes))
    return [*levels, *below]
