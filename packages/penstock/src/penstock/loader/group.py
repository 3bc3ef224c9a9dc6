"""Loading with a process group: the exchange of all tensors, in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3

from penstock.cuda.driver import QUEUE_DEPTH, load_driver
from penstock.engine.place import HostPlace, Segment, place_on
from penstock.loader.run import LoadRun
from penstock.loader.session import Batch, LoadSession
from penstock.plan.schedule import LoadPlan
from penstock.ranks.agreement import RankWords
from penstock.ranks.exchange import RankExchange, reads_per_turn
from penstock.types import I64, Box, TensorTable

ROUNDS_IN_FLIGHT = 2
"""Number of rounds queued on a CUDA device. One is packed while another is gathered."""


def exchange(
    session: LoadSession, group: dist.ProcessGroup, table: TensorTable, boxes: Sequence[Box | None]
) -> Iterator[Batch]:
    """Load the whole tensors in `table` with the group. Yield names with tensors, or with this rank's boxes.

    Collective. Every rank raises PlanError if their weights or options differ, and PeerLost if another rank failed.
    """
    ranks = RankWords(group, session.options.device, session.settings.stall_s)
    # The ranks on one host share its cores, page cache and link, so each rank makes fewer concurrent reads.
    session.intake.local_world_size = ranks.world_size
    with ranks.reports_failure():
        plan = session.make_plan(table, [None] * len(table), pack=True, exact=ranks.device.type == "cpu")
        place = place_on(ranks.device, plan.slab_nbytes.tolist())
        if not isinstance(place, HostPlace):
            session.phases.enter("allocate")
            place.allocate()
    part = _PlanPart(session, ranks, plan, place)
    depth = 1 if ranks.device.type == "cpu" else ROUNDS_IN_FLIGHT
    part.rounds.prepare(plan_digest(plan, session.manifest.revision), num_payloads=depth, num_in_flight=depth)
    part.rounds.carry_out(part)
    part.run.ticket.wait(stall_s=session.settings.stall_s)
    # Cut the boxes after the exchange, because the exchange needs the same plan on all ranks.
    region = dict(zip(table.names, boxes, strict=True))
    for names, tensors in session.batches(plan, part.run.slabs(), place.take):
        cuts = ((tensor, region[name]) for name, tensor in zip(names, tensors, strict=True))
        yield names, [tensor if box is None else tensor[box.slices].clone() for tensor, box in cuts]


def plan_digest(plan: LoadPlan, revision: str) -> bytes:
    """Return a digest that is equal on ranks that planned the same reads of the same weights."""
    digest = blake3(revision.encode())
    for column in (plan.read_file, plan.read_offset, plan.read_nbytes, plan.seg_dst, plan.slab_nbytes):
        digest.update(column.tobytes())
    digest.update("\n".join(plan.table.names).encode())
    return digest.digest()


class _PlanPart:
    """One rank's part in the exchange of a plan, which reads into slabs and copies between slabs and payloads."""

    run: LoadRun

    def __init__(self, session: LoadSession, ranks: RankWords, plan: LoadPlan, place: Any) -> None:
        self._session = session
        self._ranks = ranks
        self._plan = plan
        self._place = place
        self._per_turn = reads_per_turn(ranks.device, session.intake.chunk_bytes)
        # Join the segments of all rounds now, because Python code in each round would delay the reading thread.
        self._pieces = _pieces(plan, self._per_turn)
        self._turn_nbytes = [sum(piece.run for piece in pieces) for pieces in self._pieces]
        self._device: _DeviceCopies | None = None
        self.rounds = RankExchange(ranks, self._turn_nbytes)

    def begin(self) -> None:
        """See `RankPart.begin`."""
        own = range(self._ranks.rank, len(self._pieces), self._ranks.world_size)
        reads = [read for turn in own for read in self._reads(turn)]
        checker = self._session.checker(self._plan, self._place)
        self.run = self._session.begin(self._plan, self._place, checker=checker, reads=reads)
        self._session.enter_move()
        self._session.group_bytes = sum(self._turn_nbytes) - sum(map(self._turn_nbytes.__getitem__, own))
        if self._ranks.device.type == "cuda":
            starts = range(0, len(self._pieces), self._ranks.world_size)
            most = max((sum(map(len, self._pieces[at : at + self._ranks.world_size])) for at in starts), default=0)
            # A stream also accepts gathers, events and status copies, so let copies fill only half of its queue.
            may_wait = ROUNDS_IN_FLIGHT * most > QUEUE_DEPTH // 2
            self._device = _DeviceCopies(self._pieces, self._place.slab, self._ranks.device, may_wait=may_wait)

    def fill(self, k: int, payload: torch.Tensor, timeout_s: float) -> bool:
        """See `RankPart.fill`."""
        turn = self.rounds.turns(k)[self._ranks.rank]
        if not self.run.wait_reads(self._reads(turn), timeout_s):
            return False
        if self._device is not None:
            self._device.pack(turn, payload)
        else:
            for piece, at in self._placed(turn):
                payload[at : at + len(piece)].copy_(piece)
        return True

    def _reads(self, turn: int) -> range:
        return range(self._plan.num_reads)[turn * self._per_turn : (turn + 1) * self._per_turn]

    def keep(self, k: int, payloads: torch.Tensor) -> None:
        """See `RankPart.keep`."""
        turns, own = self.rounds.turns(k), self._ranks.rank
        if self._device is not None:
            self._device.unpack(turns, own, payloads)
            return
        for rank, turn in enumerate(turns):
            for piece, at in self._placed(turn) if rank != own else ():
                piece.copy_(payloads[rank, at : at + len(piece)])

    def _placed(self, turn: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the pieces of a turn in host slabs, with their offsets in the turn."""
        at = 0
        for _, slab, dst, nbytes, _, _ in self._pieces[turn] if turn < len(self._pieces) else ():
            yield torch.from_numpy(self._place.slab(slab)[dst : dst + nbytes]), at
            at += nbytes

    def arrived(self, k: int) -> None:
        """See `RankPart.arrived`."""
        # Call `arrived` once for all ranks, because it acquires locks that the reading thread needs.
        turns = enumerate(self.rounds.turns(k))
        others = [self._pieces[turn : turn + 1] for rank, turn in turns if rank != self._ranks.rank]
        self.run.arrived([piece for turn in others for pieces in turn for piece in pieces])


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
