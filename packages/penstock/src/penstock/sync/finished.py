"""Finished parameters of one number of ranks, made of those that a keeper has of another number.

In: a module, the recording of its loader, and what the ranks of an earlier engine handed over, each with a layout. Out:
the module filled by copies within this host's memory, or an error that says why that cannot be.
Not here: recording a loader (`recording`), the proof that held boxes cover the wanted ones (`plan.sync`), keeping
(`keeper.hand_over`), what an engine does if it cannot be (`integrations`).

    handed over by 2 ranks   rank 0: q[0:4] k[0:1] ...  + layout     the layout says in which tensor, and where in it,
                             rank 1: q[4:8] k[1:2] ...  + layout     each box of the checkpoint lies
    wanted by 1 rank         q[0:8] k[0:2] ...: planned as in a sync, and copied

Parameters are described as they are stored: a tensor that the loader casts has the dtype after the cast, and a tag that
names the cast, so that only values of the same casts are exchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from penstock.config import ConnectionSettings
from penstock.digest.strip import memory_at
from penstock.errors import PlanError
from penstock.hub.messages import HoldingState, layout_digest
from penstock.keeper.attach import attach
from penstock.lifecycle import paused_gc
from penstock.loader.into import own_state
from penstock.peer.local_weights import layout_of_tensors, tabulate
from penstock.plan.intersect import MAX_LISTED
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import Part, plan_sync
from penstock.report import Summarised, bytes_text
from penstock.sync.copy_plan import strip_view
from penstock.sync.local_version import locate
from penstock.sync.recording.layout import Recording, checkpoint_shards
from penstock.sync.recording.requirements import wanted
from penstock.sync.shards import declared, layout_of, regions_of
from penstock.transport.protocol import Memory
from penstock.types import DType, TensorTable

_RANK = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True, order=True)
class KeptSet:
    """The ranks of one engine that handed over its parameters."""

    size: int
    """The number of ranks."""
    config: str
    """What parameters depend on besides the name under which they are kept; engines of two sizes differ in it."""

    def coordinates(self, rank: int) -> dict[str, str]:
        """Return the parallel coordinates under which a rank's parameters are handed over."""
        return {"rank": f"{rank}/{self.size}", "config": self.config}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport(Summarised):
    """The report of parameters that were made of those of another set of ranks."""

    model: str
    num_ranks: int
    """The number of ranks that had handed them over."""
    kept_bytes: int
    """Bytes of all these ranks."""
    nbytes: int
    """Bytes that were copied."""
    phases: Mapping[str, float]
    """Seconds of `attach` (with the verification of all ranks), `plan`, `copy`."""
    verified: bool

    def summary(self) -> str:
        """Return a line for people."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        checked = "verified here" if self.verified else "not verified here (verify=False), only by the keeper"
        return (
            f"{self.model}: re-sharded from {self.num_ranks} kept ranks of {bytes_text(self.kept_bytes)} together, "
            f"{bytes_text(self.nbytes)} copied in memory: {phases}; {checked}"
        )


def kept_sets(holdings: Sequence[HoldingState], own: KeptSet) -> tuple[list[KeptSet], list[str]]:
    """Return the sets of which all ranks are among these holdings, the fewest ranks first; and why others are not.

    Args:
        holdings: everything under one name that keepers of this host have; see `kept_here`.
        own: left out.
    """
    ranks: dict[KeptSet, set[int]] = {}
    for holding in holdings:
        parallel = holding.identity.parallel
        if at := _RANK.fullmatch(parallel.get("rank", "")):
            ranks.setdefault(KeptSet(int(at[2]), parallel.get("config", "")), set()).add(int(at[1]))
    ranks.pop(own, None)
    complete, lacking = [], []
    for engine, kept in sorted(ranks.items()):
        missing = [str(rank) for rank in range(engine.size) if rank not in kept]
        if not missing:
            complete.append(engine)
            continue
        listed = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        lacking.append(f"of {engine.size} ranks, rank {listed} is not kept on this host")
    return complete, lacking


def kept_layout(module: torch.nn.Module, recording: Recording, table: TensorTable) -> bytes:
    """Return where the boxes of a checkpoint lie in a module's parameters, to be handed over with these.

    Args:
        module: finished, as it is handed over.
        recording: of its loader.
        table: the checkpoint.

    Raises:
        PlanError: part of the loading is not recorded, or stores a tensor in two ways; names the tensors.
    """
    recording, _, tags = _as_stored(recording, table)
    tensors = {name: tensor.detach() for name, tensor in own_state(module, whole=True).items()}
    with paused_gc():
        rows = [
            replace(row, form=replace(row.form, tag=tags.get(row.name, "")))
            for row in declared(checkpoint_shards(tensors, recording))
        ]
        # The member is set by those that use it: equal parameters have equal layouts.
        return encode(layout_of(rows, "", "", _memories(tensors)))


def reshard(
    module: torch.nn.Module,
    recording: Recording,
    table: TensorTable,
    model: str,
    source: KeptSet,
    *,
    connection: ConnectionSettings | str | None = None,
    verify: bool = True,
) -> ReshardReport:
    """Fill a module on the CPU from what the ranks of another engine handed over.

    Args:
        module: new, with memory of its own.
        recording: of its loader.
        table: the checkpoint.
        model: the name under which the sets are kept.
        source: the set to use, one of `kept_sets`.
        connection: as of `attach`.
        verify: digest all of the ranks' bytes here; see `attach`.

    Raises:
        PlanError: the recording does not allow it, or not all elements are kept; names the tensors.
        PenstockError: as `attach`: a rank is not kept any more, or its bytes changed.

    After an error the module has no complete weights: load them in another way.
    """
    begun = time.perf_counter()
    with ExitStack() as stack:
        kept = [
            stack.enter_context(
                attach(
                    model,
                    connection=connection,
                    device="cpu",
                    parallel=source.coordinates(rank),
                    verify=verify,
                    timeout_s=0,
                )
            )
            for rank in range(source.size)
        ]
        attached = time.perf_counter()
        filling = Filling(module, recording, table, [KeptRank(tensors=rank, layout=rank.layout) for rank in kept])
        planned = time.perf_counter()
        filling.run()
        # After the copies: they are of the bytes that were verified only if nothing has changed until now.
        for rank in kept:
            rank.check()
        copied = time.perf_counter()
    return ReshardReport(
        model=model,
        num_ranks=source.size,
        kept_bytes=sum(rank.report.nbytes for rank in kept),
        nbytes=filling.nbytes,
        phases={"attach": attached - begun, "plan": planned - attached, "copy": copied - planned},
        verified=verify,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRank:
    """The parameters that one rank handed over."""

    tensors: Mapping[str, torch.Tensor]
    layout: bytes
    """As of `kept_layout`; empty: there is none."""


class Filling:
    """A module's parameters, planned of kept ones and not copied yet.

    Args:
        module, recording, table: see `reshard`.
        kept: all ranks of the other size.

    Attributes:
        nbytes: bytes that `run` copies.

    Raises:
        PlanError, FormatError: see `reshard`.
    """

    def __init__(
        self, module: torch.nn.Module, recording: Recording, table: TensorTable, kept: Sequence[KeptRank]
    ) -> None:
        recording, table, tags = _as_stored(recording, table)
        holdings = [_kept_layout_of(rank, f"rank {number} of {len(kept)}") for number, rank in enumerate(kept)]
        _check_unfilled(module, recording, kept)
        with paused_gc():
            self._needed = wanted(module, recording, table, tags=tags)
            self._into = regions_of(self._needed.rows)
            want = layout_of(self._needed.rows, "this rank", "", self._into)
            self._part = plan_sync(holdings, [want]).part(0)
        if any(memory.device != "cpu" for memory in self._into):
            raise PlanError("the module is not on the CPU")
        self._sources = [_memories(rank.tensors) for rank in kept]
        sizes = [sum(layout.regions) for layout in holdings]
        self._part.check(src_nbytes=sizes, dst_nbytes=sum(want.regions))
        self.nbytes = self._part.nbytes

    def run(self) -> None:
        """Copy, and finish what is stored in another order than it is kept in."""
        _copy(self._part, self._sources, self._into)
        self._needed.install()
        self._needed.finish()


def _as_stored(recording: Recording, table: TensorTable) -> tuple[Recording, TensorTable, dict[str, str]]:
    """Return the recording and the checkpoint with the dtypes after the loader's casts, and the tags of those cast."""
    if recording.unrecorded:
        listed = [f"{name}: {why}" for name, why in list(recording.unrecorded.items())[:MAX_LISTED]]
        raise PlanError(f"its loader does more than copy {len(recording.unrecorded)} tensors: {'; '.join(listed)}")
    steps = {entry.source: entry.steps for entry in recording.records}
    for entry in recording.records:
        if entry.steps != steps[entry.source]:
            raise PlanError("its loader stores it in two ways, by different casts", tensor=entry.source)
    dtypes = []
    for name, dtype in zip(table.names, table.dtypes, strict=True):
        stored = steps[name][-1][1] if steps.get(name) else dtype
        if stored is not dtype and DType.F4 in (stored, dtype):
            # Boxes count two elements of F4 as one: the shapes of both dtypes differ.
            raise PlanError(f"its loader reads {dtype} as {stored}", tensor=name)
        dtypes.append(stored)
    table = tabulate(table.names, dtypes, table.shapes)
    tags = {name: " ".join(f"{kind}:{dtype}" for kind, dtype in mine) for name, mine in steps.items() if mine}
    plain = tuple(msgspec.structs.replace(entry, steps=()) for entry in recording.records)
    return replace(recording, records=plain, layout=layout_digest(table)), table, tags


def _memories(tensors: Mapping[str, torch.Tensor]) -> tuple[Memory, ...]:
    """Return the memory of each kept tensor, in the order in which a keeper has them."""
    _, flat = layout_of_tensors(tensors)
    return tuple(Memory(address=t.data_ptr(), nbytes=t.nbytes, device=str(t.device), owner=t) for t in flat)


def _kept_layout_of(rank: KeptRank, member: str) -> Layout:
    """Return the layout of the parameters that a rank handed over."""
    if not rank.layout:
        hint = "the log of the engine that handed it over says why"
        raise PlanError(f"{member}: where the checkpoint lies in it was not recorded", hint=hint)
    layout = replace(decode(rank.layout, Layout), member=member)
    layout.check()
    nbytes = tuple(memory.nbytes for memory in _memories(rank.tensors))
    if layout.regions != nbytes:
        raise PlanError(f"{member}: its layout is of {len(layout.regions)} tensors of other sizes than are kept")
    return layout


def _check_unfilled(module: torch.nn.Module, recording: Recording, kept: Sequence[KeptRank]) -> None:
    """Raise PlanError unless what the loader leaves as it is in this module is the same in all kept ranks.

    A recording does not tell a tensor that the loader does not touch from one that it fills with values of its own.
    """
    state = own_state(module, whole=True)
    gaps = []
    for name, count in recording.unfilled.items():
        tensor = state[name].detach()
        if count != tensor.numel():
            gaps.append(f"{name}: {count} of {tensor.numel()} elements")
        elif not all(_same(tensor, rank.tensors.get(name)) for rank in kept):
            gaps.append(f"{name}: other values in this module than are kept")
    if gaps:
        more = f"; and {len(gaps) - MAX_LISTED} more" if len(gaps) > MAX_LISTED else ""
        raise PlanError(f"no tensor of the checkpoint fills {len(gaps)} tensors: {'; '.join(gaps[:MAX_LISTED])}{more}")


def _same(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal bit for bit."""
    if other is None or other.dtype != tensor.dtype or other.shape != tensor.shape:
        return False
    # As bytes: a NaN is not equal to itself.
    ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(ours, theirs)


def _copy(part: Part, sources: Sequence[Sequence[Memory]], into: Sequence[Memory]) -> None:
    """Carry out a part within this process's memory.

    Args:
        part: checked.
        sources: the memories of each of its sources, in the order of that one's regions.
        into: the memories of the receiver.
    """
    ends = [_Regions(memories) for memories in sources]
    own = _Regions(into)
    span = (part.num_rows - 1, part.run_bytes)
    dst = own.find(part.dst, part.dst + span[0] * part.dst_pitch + span[1])
    for number, end in enumerate(ends):
        mine = np.flatnonzero(part.source == number)
        start = part.src[mine]
        src = end.find(start, start + span[0][mine] * part.src_pitch[mine] + span[1][mine])
        columns = (mine, src[0], src[1], part.run_bytes[mine], part.num_rows[mine], part.src_pitch[mine])
        for i, region, at, run, rows, pitch in zip(*(column.tolist() for column in columns), strict=True):
            to = strip_view(own.memories[dst[0][i]], dst[1][i], run, rows, part.dst_pitch[i])
            to[...] = strip_view(end.memories[region], at, run, rows, pitch)


class _Regions:
    """Memories that count as if they lay end to end."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = [memory_at(memory.address, memory.nbytes) for memory in memories]
        self._first = np.cumsum([0, *(memory.nbytes for memory in memories)], dtype=np.int64)

    def find(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the region of each span, and where the span begins in it."""
        region = locate(self._first, start, stop)
        return region, start - self._first[region]
