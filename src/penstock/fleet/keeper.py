"""A keeper: holds models for the engines of its host, which map them without a copy, and outlives them.

In: weight sets by URI, on one device, within a bound. Out: whole holdings of the fleet that engines attach to.
Not here: what engines call (`attach`), moving the bytes (`join`, `fetch`).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from penstock.config import Settings
from penstock.errors import BudgetTooSmall, ConfigError, NotFound, SourceBusy
from penstock.fleet.client import HubClient
from penstock.fleet.holding import Holding
from penstock.fleet.identity import Identity
from penstock.fleet.join import Fleet
from penstock.fleet.line import revision_of
from penstock.fleet.member import Member
from penstock.fleet.report import FetchReport
from penstock.fleet.stop import until_stopped
from penstock.loader.session import resolve_device
from penstock.loader.verify import inspect
from penstock.memory.arena import needed_bytes
from penstock.storage.manifest import Uris

DRAIN_S = 30.0
"""How long engines and readers are waited for. An engine that was killed counts until its lease runs out, in 15 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One model that is kept."""

    model: str
    key: str
    revision: str
    nbytes: int
    """Of memory, gaps between tensors included."""
    device: str
    num_attached: int
    """Engines that use it."""


class Keeper:
    """Keeps models until `drop` or `leave`. A context manager, whose end is `leave`; one thread at a time calls it.

    Args:
        device: where all of them are kept: `"cpu"` is shared memory of this host.
        memory_bytes: bound of all of them together; None: what the device has.
        settings: of reading storage.
        hub, token, rack, listen, transports, max_readers, max_bytes_per_s: see `penstock.join`.

    Raises:
        HubUnavailable, ConfigError, MissingExtra: see `penstock.join`.
    """

    def __init__(
        self,
        *,
        device: str | int | torch.device = "cpu",
        memory_bytes: int | None = None,
        hub: str | None = None,
        token: str | None = None,
        rack: str = "",
        listen: str | None = None,
        transports: Sequence[str] | None = None,
        max_readers: int = 4,
        max_bytes_per_s: int = 0,
        settings: Settings | None = None,
    ) -> None:
        self.device, self._memory_bytes = resolve_device(device), memory_bytes
        self._settings = Settings.read() if settings is None else settings
        self._max_readers = max_readers
        self._kept: dict[str, tuple[Holding, int]] = {}
        self._stopped = threading.Event()
        self.member = Member(
            HubClient.connect(hub, token=token),
            token=token,
            rack=rack,
            listen=listen,
            transports=transports,
            max_bytes_per_s=max_bytes_per_s,
            stall_s=self._settings.stall_s,
        )

    def keep(self, model: str, uri: Uris, *, storage_options: Mapping[str, str] | None = None) -> FetchReport:
        """Fetch a model from members that have it, and from storage what they have not; keep it from then on.

        Args:
            model: the name that engines attach by.
            uri: where storage has it; see `load`.
            storage_options: see `load`.

        Raises:
            BudgetTooSmall: `memory_bytes` has no room for it beside what is kept; nothing was fetched.
            ConfigError: this revision of it is kept already.
            PenstockError: see `Fleet.fetch`; what was kept before is kept still.
        """
        found = inspect(uri, storage_options=storage_options)
        revision = revision_of(found.manifest)
        if any((one.model, one.revision) == (model, revision) for one in self.models()):
            raise ConfigError(f"{model!r} is kept already, in this revision", uri=found.uri)
        nbytes = needed_bytes(found.manifest.tensors.nbytes.tolist())
        used = sum(nbytes for _, nbytes in self._kept.values())
        if self._memory_bytes is not None and used + nbytes > self._memory_bytes:
            message = f"{model!r} takes {nbytes} bytes beside {used} that are kept, of {self._memory_bytes}"
            raise BudgetTooSmall(message, minimum_bytes=used + nbytes)
        fleet = Fleet(Identity(model=model), self.member, self._settings, max_readers=self._max_readers)
        tensors: dict[str, torch.Tensor] = {}
        report = fleet.fetch(tensors, fallback=uri, device=self.device, storage_options=storage_options)
        holding = next(one for one in self.member.holdings if one.key == report.key)
        holding.kept = True
        self._kept[holding.key] = holding, nbytes
        self.member.tell()
        return report

    def models(self) -> list[Kept]:
        """What is kept now, in the order it came."""
        return [
            Kept(
                model=holding.identity.model,
                key=key,
                revision=holding.identity.revision,
                nbytes=nbytes,
                device=str(holding.device),
                num_attached=self.member.door.num_attached(key),
            )
            for key, (holding, nbytes) in self._kept.items()
        ]

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
            raise NotFound(f"{model!r} is not kept here in revision {revision or 'of any kind'}")
        deadline = time.monotonic() + drain_s
        for key in keys:
            self._drop(key, max(0.0, deadline - time.monotonic()))
        gc.collect()  # memory is given back when the last view of it is gone
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop(self, key: str, drain_s: float) -> None:
        holding, _ = self._kept[key]
        holding.become("draining")
        self.member.beat_now()
        left = self.member.door.drain(key, drain_s)
        if left:
            attached = self.member.door.num_attached(key)
            holding.become("whole")
            self.member.door.show(holding)
            self.member.beat_now()
            message = f"{attached} engines and {left - attached} readers still use {holding.identity.model!r}"
            raise SourceBusy(message, hint="stop them, or wait longer: drain_s")
        self.member.hide(holding, 0.0)
        self.member.tell()
        del self._kept[key]

    def serve(self, *, drain_s: float = DRAIN_S, timeout_s: float | None = None) -> None:
        """Keep until `leave`, SIGTERM or SIGINT; then wait for engines and readers at most `drain_s`, and leave.

        Args:
            drain_s: of the end; a second signal does not wait.
            timeout_s: return after this long, still keeping; None: no bound.
        """
        if until_stopped(self._stopped, timeout_s):
            self.leave(drain_s)

    def leave(self, drain_s: float = DRAIN_S) -> None:
        """Let nobody new in, wait for engines and readers at most `drain_s`, say good-bye. Idempotent.

        Host memory that an engine has mapped stays its own for as long as it is mapped, whatever becomes of the keeper.
        """
        self._stopped.set()
        self.member.leave(drain_s)
        self._kept.clear()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(DRAIN_S if kind is None else 0.0)
