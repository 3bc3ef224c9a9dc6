"""Loading with a process group: each rank reads a part of the bytes once, and the ranks exchange the parts.

In each round every rank packs the chunks that it has read with a status word, gathers the payloads of all ranks and
unpacks the other ranks' chunks. A failed rank still joins the round, so that all ranks raise after the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3

from penstock.cuda.driver import QUEUE_DEPTH, load_driver
from penstock.engine.place import HostPlace, Segment, place_on
from penstock.errors import PeerLost, PenstockError
from penstock.loader.run import LoadRun
from penstock.loader.session import Batch, LoadSession
from penstock.plan.schedule import LoadPlan
from penstock.ranks.agreement import RankWords
from penstock.types import I64, Box, TensorTable

STATUS_BYTES = 512
"""Bytes reserved for the status word after each payload, so that payloads stay aligned for copy engines."""

ROUND_BYTES = 32 << 20
"""Bytes that a rank contributes to a round on CUDA. Large rounds amortise the fixed costs of NCCL and Python."""

ROUNDS_IN_FLIGHT = 2
"""Number of rounds queued on a CUDA device. One is packed while another is gathered."""


def exchange(
    session: LoadSession, group: dist.ProcessGroup, table: TensorTable, boxes: Sequence[Box | None]
) -> Iterator[Batch]:
    """Load the whole tensors in `table` with the group. Yield names with tensors, or with this rank's boxes.

    Collective. Every rank raises PlanError if their weights or options differ, and PeerLost if another rank failed.
    """
    ranks = LoadGroup(group, session.options.device, session.settings.stall_s)
    # The ranks on one host share its cores, page cache and link, so each rank makes fewer concurrent reads.
    session.intake.local_world_size = ranks.world_size
    with ranks.reports_failure():
        plan = session.make_plan(table, [None] * len(table), pack=True, exact=session.options.device.type == "cpu")
    ranks.agree_on(plan, session.manifest.revision)
    place, failed = _place(session, plan)
    checker = session.checker(plan, place)
    # On the CPU the host waits for each round, so a larger round would only use more memory.
    per_round = 1 if session.options.device.type == "cpu" else max(1, ROUND_BYTES // session.intake.chunk_bytes)
    turns = np.arange(plan.num_reads) // per_round % ranks.world_size
    # Assign runs of adjacent chunks, so that a rank reads long ranges of a file.
    mine = [] if failed is not None else np.flatnonzero(turns == ranks.rank).tolist()
    run = session.begin(plan, place, checker=checker, reads=mine)
    session.enter_move()
    is_ours = np.repeat(turns == ranks.rank, np.diff(plan.seg_first))
    session.group_bytes = int((plan.seg_run * plan.seg_rows)[~is_ours].sum())
    _Rounds(run, place, ranks, per_round, failed).carry_out()
    run.ticket.wait(stall_s=session.settings.stall_s)
    # Cut the boxes after the exchange, because the exchange needs the same plan on all ranks.
    region = dict(zip(table.names, boxes, strict=True))
    for names, tensors in session.batches(plan, run.slabs(), place.take):
        cuts = ((tensor, region[name]) for name, tensor in zip(names, tensors, strict=True))
        yield names, [tensor if box is None else tensor[box.slices].clone() for tensor, box in cuts]


def _place(session: LoadSession, plan: LoadPlan) -> tuple[Any, PenstockError | None]:
    """Return the slabs, and the error if their allocation failed, for the first round to report to the other ranks."""
    place = place_on(session.options.device, plan.slab_nbytes.tolist())
    if isinstance(place, HostPlace):
        return place, None
    session.phases.enter("allocate")
    try:
        place.allocate()
    except PenstockError as error:
        return place, error
    return place, None


class LoadGroup(RankWords):
    """The collectives of a load's ranks, and their agreement on a plan before they read."""

    poll_s = 1e-3
    """Seconds between checks, about half of a round. Each check takes the GIL from the reading thread."""

    @contextmanager
    def reports_failure(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, which are waiting to agree on a plan, and raise it."""
        try:
            yield
        except PenstockError as error:
            self.agree(error=error)

    def agree_on(self, plan: LoadPlan, revision: str) -> None:
        """Check that all ranks planned the same reads of the same weights. Raise the errors of `agree`."""
        digest = blake3(revision.encode())
        for column in (plan.read_file, plan.read_offset, plan.read_nbytes, plan.seg_dst, plan.slab_nbytes):
            digest.update(column.tobytes())
        digest.update("\n".join(plan.table.names).encode())
        self.agree(digest=digest.digest())


class _Rounds:
    """The rounds of one load's exchange. On CUDA the host waits only to limit the number of rounds in flight."""

    def __init__(
        self, run: LoadRun, place: Any, ranks: LoadGroup, per_round: int, failed: PenstockError | None
    ) -> None:
        self._run = run
        self._plan = run.plan
        self._ranks = ranks
        self._per_round = per_round
        self._is_host = ranks.device.type == "cpu"
        self._failed: PenstockError | RuntimeError | None = failed
        # Join the segments of all rounds now, because Python code in each round would delay the reading thread.
        self._pieces = _pieces(self._plan, per_round)
        self._copies: _HostCopies | _DeviceCopies | None = None
        if failed is None:
            try:
                self._copies = self._copies_of(place)
            except (PenstockError, RuntimeError) as error:
                # Report the error in the first round, so that the other ranks do not wait for this rank.
                self._failed = error
        payload = max((sum(piece.run for piece in pieces) for pieces in self._pieces), default=0)
        # `all_gather` requires the same width on all ranks. The last round is padded.
        self._width = -(-payload // STATUS_BYTES) * STATUS_BYTES + STATUS_BYTES
        depth = 1 if self._is_host else ROUNDS_IN_FLIGHT
        self._slots = [_Slot(ranks, self._width) for _ in range(depth)]

    def _copies_of(self, place: Any) -> _HostCopies | _DeviceCopies:
        if self._is_host:
            return _HostCopies(self._pieces, place.slab)
        world_size = self._ranks.world_size
        starts = range(0, len(self._pieces), world_size)
        most = max((sum(map(len, self._pieces[at : at + world_size])) for at in starts), default=0)
        # A stream also accepts gathers, events and status copies, so let copies fill only half of its queue.
        may_wait = ROUNDS_IN_FLIGHT * most > QUEUE_DEPTH // 2
        return _DeviceCopies(self._pieces, place.slab, self._ranks.device, may_wait=may_wait)

    def carry_out(self) -> None:
        per_turn = self._ranks.world_size * self._per_round
        num_rounds = -(-self._plan.num_reads // per_turn)
        for k in range(num_rounds + len(self._slots)):
            slot = self._slots[k % len(self._slots)]
            if slot.round is not None:
                self._end(slot)
            if k < num_rounds:
                self._begin(slot, k)
        if self._failed is not None:
            raise self._failed

    def _begin(self, slot: _Slot, k: int) -> None:
        """Pack this rank's chunks and start the gather. On CUDA, also queue the unpacking on the current stream."""
        ranks = self._ranks
        slot.round = k
        first = (k * ranks.world_size + ranks.rank) * self._per_round
        try:
            if self._failed is None:
                self._run.wait_reads(range(first, min(first + self._per_round, self._plan.num_reads)))
        except (PenstockError, RuntimeError) as error:
            self._failed = error
        # A rank that failed continues with the rounds, because leaving a collective would block the other ranks.
        if self._failed is not None:
            slot.send[-1] = 1
        elif self._copies is not None:
            self._copies.pack(self._turns(k)[ranks.rank], slot.send)
        slot.work = ranks.post_gather(slot.received.view(-1), slot.send)
        if not self._is_host:
            # On CUDA, `wait` orders the stream after the gather, and the host continues at once.
            slot.work.wait()
            self._unpack(slot)
            # Copy the status words to pinned memory last, because reading them on the device would wait for the round.
            slot.status.copy_(slot.received[:, -1], non_blocking=True)
            slot.done.record()

    def _end(self, slot: _Slot) -> None:
        """Wait for the round and record its chunks as arrived. Raise on all ranks if a rank failed."""
        ranks, k = self._ranks, slot.round
        assert k is not None
        if self._is_host:
            ranks.finish(slot.work)
            self._unpack(slot)
            slot.status.copy_(slot.received[:, -1])
        else:
            # Poll with a deadline, because a rank that hangs never enters its collective.
            ranks.wait(slot.done.query)
        slot.round = None
        lost = [rank for rank, word in enumerate(slot.status.tolist()) if word]
        if lost:
            raise self._failed or PeerLost(f"ranks {lost} of the group failed", hint="see the errors of these ranks")
        # Call `arrived` once for all ranks, because it acquires locks that the reading thread needs.
        others = [self._pieces[turn : turn + 1] for rank, turn in enumerate(self._turns(k)) if rank != ranks.rank]
        self._run.arrived([piece for turns in others for pieces in turns for piece in pieces])

    def _unpack(self, slot: _Slot) -> None:
        assert slot.round is not None
        if self._failed is None and self._copies is not None:
            self._copies.unpack(self._turns(slot.round), self._ranks.rank, slot.received)

    def _turns(self, k: int) -> range:
        return range(k * self._ranks.world_size, (k + 1) * self._ranks.world_size)


class _HostCopies:
    """Copies between host slabs and payloads of rounds, complete when the method that makes them returns."""

    def __init__(self, pieces: Sequence[Sequence[Segment]], slab: Callable[[int], Any]) -> None:
        self._pieces = pieces
        self._slab = slab

    def pack(self, turn: int, payload: torch.Tensor) -> None:
        for piece, at in self._placed(turn):
            payload[at : at + len(piece)].copy_(piece)

    def unpack(self, turns: range, own: int, payloads: torch.Tensor) -> None:
        for rank, turn in enumerate(turns):
            if rank != own:
                for piece, at in self._placed(turn):
                    piece.copy_(payloads[rank, at : at + len(piece)])

    def _placed(self, turn: int) -> Iterator[tuple[torch.Tensor, int]]:
        at = 0
        for _, slab, dst, nbytes, _, _ in self._pieces[turn] if turn < len(self._pieces) else ():
            yield torch.from_numpy(self._slab(slab)[dst : dst + nbytes]), at
            at += nbytes


class _DeviceCopies:
    """Copies between device slabs and payloads, queued on the stream that is current at construction.

    The methods call the CUDA driver, because torch's calls would release the GIL to the reading thread.
    """

    def __init__(
        self, pieces: Sequence[Sequence[Segment]], slab: Callable[[int], Any], device: torch.device, *, may_wait: bool
    ) -> None:
        self._may_wait = may_wait
        self._driver = load_driver()
        self._device = device.index
        self._stream: int = torch.cuda.current_stream(device).cuda_stream
        rows = [piece for turn in pieces for piece in turn]
        starts = {number: slab(number).data_ptr() for number in {piece.slab for piece in rows}}
        self._address = np.array([starts[piece.slab] + piece.dst for piece in rows], np.int64)
        self._nbytes = np.array([piece.run for piece in rows], np.int64)
        counts = np.array([len(turn) for turn in pieces], np.int64)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        begin = np.concatenate(([0], np.cumsum(self._nbytes)))
        self._at = begin[:-1] - np.repeat(begin[self._first[:-1]], counts)
        self._turn = np.repeat(np.arange(len(pieces)), counts)

    def _rows(self, start: int, stop: int) -> slice:
        """Return the pieces of turns `[start, stop)`. There are no pieces after the last turn."""
        last = len(self._first) - 1
        return slice(int(self._first[min(start, last)]), int(self._first[min(stop, last)]))

    def pack(self, turn: int, payload: torch.Tensor) -> None:
        rows = self._rows(turn, turn + 1)
        self._queue(payload.data_ptr() + self._at[rows], self._address[rows], self._nbytes[rows])

    def unpack(self, turns: range, own: int, payloads: torch.Tensor) -> None:
        rows = self._rows(turns.start, turns.stop)
        rank = self._turn[rows] - turns.start
        source = payloads.data_ptr() + rank * payloads.stride(0) + self._at[rows]
        others = rank != own
        self._queue(self._address[rows][others], source[others], self._nbytes[rows][others])

    def _queue(self, dst: I64, src: I64, nbytes: I64) -> None:
        # The calling thread may have a different current device.
        with self._driver.entered(self._device):
            to, of, length = (column.astype(np.uint64) for column in (dst, src, nbytes))
            self._driver.copy(to, of, length, self._stream, may_wait=self._may_wait)


class _Slot:
    def __init__(self, ranks: LoadGroup, width: int) -> None:
        cuda = ranks.device.type == "cuda"
        self.send = torch.zeros(width, dtype=torch.uint8, device=ranks.device)
        self.received = torch.empty(ranks.world_size, width, dtype=torch.uint8, device=ranks.device)
        self.status = torch.zeros(ranks.world_size, dtype=torch.uint8, pin_memory=cuda)
        self.done: Any = torch.cuda.Event() if cuda else None
        self.work: Any = None
        self.round: int | None = None


def _pieces(plan: LoadPlan, per_turn: int) -> list[list[Segment]]:
    """Return the segments of each turn, which consists of `per_turn` reads. Adjacent segments in a slab are joined."""
    num_turns = -(-plan.num_reads // per_turn)
    turn = np.repeat(np.arange(plan.num_reads) // per_turn, np.diff(plan.seg_first))
    starts = np.ones(len(turn), bool)
    # Comparing offsets suffices, because whole tensors have contiguous segments.
    goes_on = (plan.seg_slab[1:] == plan.seg_slab[:-1]) & (plan.seg_dst[1:] == plan.seg_dst[:-1] + plan.seg_run[:-1])
    starts[1:] = ~goes_on | (turn[1:] != turn[:-1])
    first = np.flatnonzero(starts)
    nbytes = np.add.reduceat(plan.seg_run, first) if len(first) else first
    pieces: list[list[Segment]] = [[] for _ in range(num_turns)]
    columns = (turn[first].tolist(), plan.seg_slab[first].tolist(), plan.seg_dst[first].tolist(), nbytes.tolist())
    for at, slab, dst, run in zip(*columns, strict=True):
        pieces[at].append(Segment(0, slab, dst, run, 1, run))
    return pieces
