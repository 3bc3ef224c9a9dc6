"""Finds the tensors to fetch, from the fallback's headers or from members, and their destination."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch

from penstock.config import ReadSettings, Settings
from penstock.cuda.device_memory import wake
from penstock.digest.leaf import revision as root_revision
from penstock.errors import (
    FormatError,
    HubUnavailable,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PlanError,
    SourceError,
)
from penstock.fetcher.report import why_command
from penstock.holding.weight_layout import WeightLayout, from_message, layout_of_tensors, revision_of
from penstock.hub.messages import HoldingState, Identity
from penstock.lifecycle import paused_gc
from penstock.loader.match import match_targets, require_whole
from penstock.loader.session import LoadSession, ReadOptions
from penstock.loader.target_tensors import targets_of
from penstock.loader.tensor import as_tensor, as_tensors, torch_dtype, torch_shape
from penstock.logs import log_named
from penstock.memory.arena import Arena, needed_bytes
from penstock.memory.targets import tied_targets
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.storage.file_names import stem_of
from penstock.storage.manifest import leaves_of
from penstock.storage.weight_set import Uris
from penstock.types import U64
from penstock.waits import start_thread

_log = log_named("penstock.fetch")
T = TypeVar("T")
Target = torch.nn.Module | MutableMapping[str, torch.Tensor]

MIN_TIMEOUT_S = 0.5
"""Minimum timeout of a request to the hub, in seconds. Even with `timeout_s=0` a working hub needs time to respond."""
LOG_AFTER_S = 2.0
REQUEST_PAUSE_S = 0.2


class PlacedTarget(dict[str, torch.Tensor], ABC):
    """An empty target that allocates its tensors. `arenas` lists the arenas that contain the tensors, if any."""

    arenas: Sequence[Arena] = ()

    @abstractmethod
    def place(self, layout: WeightLayout) -> list[torch.Tensor]:
        """Return the memory for each row of the layout's table, as flat uint8 tensors."""


class FetchTarget(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The tensors to fetch and their destination, which is `rows` or new memory if `rows` is None."""

    identity: Identity
    layout: WeightLayout
    device: torch.device
    rows: Sequence[torch.Tensor] | None = None
    leaves: U64 | None = None
    session: LoadSession | None = None

    def allocate(
        self, target: Target, max_readers: int, is_over: Callable[[], bool]
    ) -> tuple[LocalWeights, Callable[[], list[torch.Tensor]] | None]:
        """Return the local weights to fill, and a function that makes their tensors if the memory is new."""
        if self.rows is not None:
            weights = LocalWeights(self.identity, self.layout, self.rows, leaves=self.leaves, max_readers=max_readers)
            return weights, None
        table = self.layout.table
        # Check dtypes and shapes now, because the tensors are created after the fetch has begun.
        for dtype, shape in set(zip(table.dtypes, table.shapes, strict=True)):
            torch_dtype(dtype)
            torch_shape(dtype, shape)
        arenas: list[Arena] = []
        if isinstance(target, PlacedTarget):
            flat = target.place(self.layout)
            arenas += target.arenas
            make: Callable[[], list[torch.Tensor]] = partial(self._tensors_of, flat)
        else:
            # One arena needs one registration. A thread touches the pages, because page faults would delay reads.
            nbytes = table.nbytes.tolist()
            arena = Arena.allocate(needed_bytes(nbytes), self.device)
            arena.warm(is_over)
            offsets = arena.place(nbytes)
            with paused_gc():
                flat = arena.runs_at(offsets, nbytes)
            make = partial(as_tensors, arena.bytes_at(0, arena.nbytes), table.dtypes, table.shapes, offsets)
            arenas.append(arena)
        weights = LocalWeights(
            self.identity, self.layout, flat, leaves=self.leaves, arenas=arenas, max_readers=max_readers
        )
        return weights, make

    def _tensors_of(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        table = self.layout.table
        return [
            as_tensor(raw, dtype, shape)
            if raw.numel()
            else torch.empty(torch_shape(dtype, shape), dtype=torch_dtype(dtype), device=self.device)
            for raw, dtype, shape in zip(flat, table.dtypes, table.shapes, strict=True)
        ]


class Discovery:
    """Finds the tensors of one fetch. Fields of `identity` that the fallback or the fleet can supply may be empty."""

    def __init__(self, identity: Identity, member: Member, settings: Settings, on_wait: Callable[[str], None]) -> None:
        self._identity = identity
        self._member = member
        self._settings = settings
        self._on_wait = on_wait

    def find(
        self,
        target: Target,
        fallback: Uris | None,
        device: torch.device,
        storage_options: Mapping[str, str] | None,
        wait_s: float | None,
        stack: ExitStack,
    ) -> FetchTarget:
        """Return the tensors to fetch. `stack` closes the session that this call opens. See also `Fleet.fetch`."""
        has_tensors = isinstance(target, torch.nn.Module) or len(target) > 0
        tensors = targets_of(target, written=True) if has_tensors else {}
        if has_tensors and not tensors:
            hint = "pass an empty dict to receive new tensors, or a module that has tensors"
            raise PlanError("the target has no tensors to fill", hint=hint)
        if tensors:
            device = next(iter(tensors.values())).device
        if device.type == "cuda":
            _in_background(partial(wake, device.index))
        if fallback is not None:
            options = ReadOptions(device=device, settings=ReadSettings(storage_options=storage_options))
            session = stack.enter_context(LoadSession(fallback, options, self._settings, in_group=True, journey=""))
            return self._stored(session, tensors, has_tensors)
        wait_s = self._settings.stall_s if wait_s is None else wait_s
        if has_tensors:
            require_whole(tensors, "fetch")
            # Tied tensors share a row of the layout, so they must be tied in the target too.
            tied_targets(list(tensors), list(tensors.values()))
            layout, rows = layout_of_tensors(tensors)
            identity = msgspec.structs.replace(self._identity, layout=layout.digest)
            identity = self._state_of(identity, {"revision"}, wait_s).identity
            return FetchTarget(identity=identity, layout=layout, rows=rows, device=device)
        state = self._state_of(self._identity, {"revision", "layout"}, wait_s)
        layout = self._retry_until(
            "a free holder",
            lambda left_s: self._layout_now(state, device, left_s),
            wait_s,
            SourceError,
            PeerLost,
            HubUnavailable,
        )
        return FetchTarget(identity=state.identity, layout=layout, device=device)

    def _stored(self, session: LoadSession, tensors: Mapping[str, torch.Tensor], has_tensors: bool) -> FetchTarget:
        table, rows = session.table(), None
        if has_tensors:
            lines = match_targets(session, tensors, None, True, whole="fetch").lines()
            table = lines.table
            rows = dict(zip(table.names, lines.tensors, strict=True))
        manifest = session.manifest
        stem = stem_of(file.name for file in manifest.files)
        layout = WeightLayout.of(table, leaf_bytes=manifest.leaf_bytes, stem=stem)
        row_of = dict(zip(manifest.tensors.names, range(len(manifest.tensors)), strict=True))
        at = np.fromiter(map(row_of.__getitem__, layout.table.names), np.int64, len(layout.table))
        leaves = leaves_of(manifest, at)
        revision, requested = revision_of(manifest), self._identity.revision
        if leaves is not None:
            if requested.startswith("w1-"):
                if not revision.startswith(requested):
                    raise IntegrityError(f"storage has revision {revision}, not {requested}", uri=session.weights.uri)
                # The request may be a prefix, but members compare complete revisions.
                requested = ""
            # With tied targets this process has fewer tensors and therefore a different root.
            if len(layout.table) < len(manifest.tensors):
                revision = root_revision(layout.table, manifest.leaf_bytes, leaves)
        # Without a manifest, the root is unknown until all files have been read, unless members have read the files.
        elif requested.startswith("w1-") and self._have_read(layout, revision, requested):
            requested = ""
        flat = None
        if rows is not None:
            _, flat = layout_of_tensors(rows)
        return FetchTarget(
            identity=msgspec.structs.replace(self._identity, revision=requested or revision, layout=layout.digest),
            layout=layout,
            rows=flat,
            device=session.options.device,
            leaves=leaves,
            session=session,
        )

    def _state_of(self, identity: Identity, open_fields: set[str], wait_s: float) -> HoldingState:
        unknown = {name for name in open_fields if not getattr(identity, name)}
        return self._retry_until(
            "a holder",
            lambda left_s: self._state_now(identity, unknown, f" after {wait_s} s", within_s=left_s),
            wait_s,
            NotFound,
            HubUnavailable,
        )

    def _state_now(
        self, identity: Identity, unknown: set[str], since: str = "", *, within_s: float | None = None
    ) -> HoldingState:
        """Return the state of the holder with the most chunks, or raise NotFound. Fields in `unknown` may differ."""
        best: HoldingState | None = None
        mismatches: dict[str, str] = {}
        for member in self._member.hub.status(identity.model, within_s=within_s).members:
            for state in member.holdings:
                if member.member == self._member.id:
                    continue
                differ = {k: v for k, v in identity.differences(state.identity).items() if k not in unknown}
                if "revision" in differ:
                    # A member without a manifest has an `h1-` revision, because it computes the root last.
                    differ["revision"] = identity.revision, state.revision or state.identity.revision
                    if identity.revision.startswith(("w1-", "h1-")) and state.is_of(identity.revision):
                        del differ["revision"]
                if differ:
                    words = (f"{name} {theirs!r}, not {mine!r}" for name, (mine, theirs) in differ.items())
                    mismatches[member.member[:8]] = ", ".join(words)
                elif best is None or _num_have(state) > _num_have(best):
                    best = state
        if best is not None:
            return best
        seen = "".join(f"; member {name} has {words}" for name, words in list(mismatches.items())[:4])
        # List the differences, because the caller cannot find mismatching identities otherwise.
        message = f"no member holds {identity.model!r}{' with the same identity' if seen else ''}{since}{seen}"
        raise NotFound(message, hint=f"run `{why_command(identity.model)}`, or pass fallback= to read storage")

    def _have_read(self, layout: WeightLayout, revision: str, requested: str) -> bool:
        same = msgspec.structs.replace(self._identity, revision=revision, layout=layout.digest)
        with contextlib.suppress(SourceError, HubUnavailable):
            if self._member.registration.away is not None:
                return False
            return self._state_now(same, set()).is_of(requested)
        return False

    def _retry_until(self, what: str, ask: Callable[[float], T], wait_s: float, *passing: type[PenstockError]) -> T:
        """Call `ask` with the remaining seconds until it succeeds. Errors in `passing` are retried for `wait_s`."""
        begun = time.monotonic()
        is_logged = False
        while True:
            waited_s = time.monotonic() - begun
            try:
                return ask(max(MIN_TIMEOUT_S, wait_s - waited_s))
            except passing as error:
                if (waited_s := time.monotonic() - begun) >= wait_s:
                    raise
                # Progress is shown on terminals only, so a waiting process would otherwise be silent.
                if not is_logged and waited_s >= min(LOG_AFTER_S, wait_s / 2):
                    is_logged = True
                    why = (
                        error.message
                        if isinstance(error, HubUnavailable)
                        else "no member holds it and fallback= is not set"
                    )
                    _log.warning("waiting for %s of %s, at most %g s: %s", what, self._identity.model, wait_s, why)
            self._on_wait(f"waiting for {what}, {waited_s:.0f} of {wait_s:.0f} s")
            # Pause longer for a slow hub, because each reply lists all members of the fleet.
            time.sleep(max(REQUEST_PAUSE_S, min(self._member.hub.rest_s, wait_s / 8)))

    def _layout_now(self, state: HoldingState, device: torch.device, within_s: float) -> WeightLayout:
        empty = HoldingState(key=state.key, identity=state.identity, num_chunks=0, nbytes=0)
        reply = self._member.find_holders(empty, within_s=within_s)
        last: PenstockError = NotFound(
            f"no member holds {state.identity.model!r} any more", hint="fetch again, or pass fallback= to read storage"
        )
        for upstream in reply.upstreams:
            try:
                # Use a quarter of the deadline for each member, so that a slow member leaves time for others.
                with self._member.peer(upstream, state.key, stall_s=self._settings.stall_s / 4) as peer:
                    peer.lease()
                    layout = from_message(peer.table())
                    # The digest comes from the hub, so it detects a wrong table from the peer.
                    if layout.digest != state.identity.layout:
                        fault = f"the member's tensor table has layout {layout.digest}, not {state.identity.layout}"
                        raise FormatError(fault, uri=f"penstock:{upstream.member}")
                    if device.type == "cuda" and peer.is_on_host:
                        # The fetch will probably read from this member, so map its memory during the allocation.
                        with contextlib.suppress(PenstockError):
                            _in_background(partial(self._member.links.reach_device, str(device), peer.map().regions))
                    return layout
            except PenstockError as error:
                last = error
        raise last


def _in_background(work: Callable[[], None]) -> None:
    def attempt() -> None:
        with contextlib.suppress(PenstockError):
            work()

    start_thread(threading.Thread(target=attempt, name="penstock-ahead", daemon=True), is_needed=False)


def _num_have(state: HoldingState) -> int:
    return sum(stop - start for start, stop in state.have)
