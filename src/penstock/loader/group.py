"""Loading as a process group: each rank reads its own part of the bytes once, and the ranks exchange the parts.

In: a session and a torch.distributed group whose ranks all call with the same plan. Out: every tensor, on every rank.
Not here: reading and placing (`session`, `engine`).

    round k: rank r has read chunk k*W + r into its slabs -> packs it with a status word -> all_gather -> each rank
    unpacks the others' chunks into its own slabs. A rank that failed goes on taking part, with its status word set,
    so that all ranks raise after the same round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3

from penstock.engine.place import HostPlace, Segment
from penstock.engine.run import LoadRun
from penstock.errors import PeerLost, PenstockError, PlanError
from penstock.loader.session import Batch, Session
from penstock.plan.schedule import LoadPlan
from penstock.types import Box, TensorTable

STATUS_BYTES = 512
"""Room for the status word behind each payload; keeps payloads aligned to what copy engines like."""

LAG_ROUNDS = 4
"""Rounds between sending a status word and looking at it, so that no round waits for the device."""

_POLL_S = 5e-5

_DIGEST_BYTES = 32

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange(
    session: Session, group: dist.ProcessGroup, table: TensorTable, boxes: Sequence[Box | None]
) -> Iterator[Batch]:
    """Load `table` (whole tensors) with the group; yield names and tensors, or the rank's own boxes of them.

    Raises:
        PlanError: the ranks' weight sets or options differ; on every rank.
        PeerLost: another rank failed or fell silent; on every other rank. The failing rank raises its own error.

    Order: collective; every rank of `group` calls it, in the same order as its other collectives.
    """
    wire = Wire(group, session.options.device, session.settings.stall_s)
    with wire.telling():
        plan = session.make_plan(table, [None] * len(table), pack=True, exact=session.options.device.type == "cpu")
    wire.agree(plan, session.manifest.revision)
    place, failed = _place(session, plan)
    checker = session.checker(plan, place)
    mine = () if failed is not None else range(wire.rank, plan.num_reads, wire.world_size)
    run = session.begin(plan, place, checker=checker, reads=mine, local_world_size=wire.world_size)
    session.phases.enter("move")
    _Rounds(run, place, wire, failed).carry_out()
    run.ticket.wait(stall_s=session.settings.stall_s)
    region = dict(zip(table.names, boxes, strict=True))
    for names, made in session.batches(plan, run.slabs(), place.take):
        yield names, [_cut(tensor, region[name]) for name, tensor in zip(names, made, strict=True)]


def _cut(tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
    """The rank's own box of a whole tensor, in memory of its own."""
    if box is None:
        return tensor
    return tensor[tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))].clone()


def _place(session: Session, plan: LoadPlan) -> tuple[Any, PenstockError | None]:
    """The slabs, or the error that the other ranks must hear of before this one raises it."""
    nbytes = plan.slab_nbytes.tolist()
    if session.options.device.type == "cpu":
        return HostPlace(nbytes), None
    from penstock.engine.place_cuda import CudaPlace

    place = CudaPlace(session.options.device, nbytes)
    session.phases.enter("allocate")
    try:
        place.allocate()
    except PenstockError as error:
        return place, error
    return place, None


class Wire:
    """The group's collectives, each with a deadline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stall_s: float) -> None:
        self.group, self.device, self.stall_s = group, device, stall_s
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not a rank of the group")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error before the ranks agreed is told to the others, who are waiting to agree, then raised."""
        try:
            yield
        except PenstockError:
            self._digests(bytes(_DIGEST_BYTES))
            raise

    def agree(self, plan: LoadPlan, revision: str) -> None:
        """Go on only if all ranks planned the same reads of the same weights.

        Raises:
            PlanError: they did not; on every rank.
            PeerLost: a rank failed before it had a plan; on every other rank.
        """
        digest = blake3(revision.encode())
        for column in (plan.read_file, plan.read_offset, plan.read_nbytes, plan.seg_dst, plan.slab_nbytes):
            digest.update(column.tobytes())
        digest.update("\n".join(plan.table.names).encode())
        found = self._digests(digest.digest())
        lost = [rank for rank, one in enumerate(found) if not any(one)]
        if lost:
            raise PeerLost(f"ranks {lost} of the group failed before they had a plan", hint="see those ranks' errors")
        odd = [rank for rank, one in enumerate(found) if one != found[0]]
        if odd:
            raise PlanError(f"ranks {odd} see other weights or options than rank 0", hint="give all ranks the same")

    def _digests(self, own: bytes) -> list[bytes]:
        """Every rank's digest; all zeros says that the rank failed."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        found = torch.empty(self.world_size * _DIGEST_BYTES, dtype=torch.uint8, device=self.device)
        self.gather(found, mine)
        return [bytes(row.tolist()) for row in found.cpu().view(self.world_size, -1)]

    def gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """all_gather, waited for. PeerLost when a rank fails or is silent for `stall_s`."""
        try:
            work = _all_gather(into, own, group=self.group, async_op=True)
            deadline = time.monotonic() + self.stall_s
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"rank {self.rank}: another rank of the group was silent for {self.stall_s} s",
                        hint="see the other ranks' errors; make a new process group",
                    )
                time.sleep(_POLL_S)
            work.wait()
        except (RuntimeError, ValueError) as error:
            # torch.distributed reports a lost peer as RuntimeError or a subclass (DistBackendError).
            raise PeerLost(f"rank {self.rank}: the group's all_gather failed: {error}") from error


class _Rounds:
    """The exchange of one run."""

    def __init__(self, run: LoadRun, place: Any, wire: Wire, failed: PenstockError | None) -> None:
        self._run, self._wire, self._plan = run, wire, run.plan
        self._slab = place.slab
        self._is_host = wire.device.type == "cpu"
        sums = np.add.reduceat(np.append(self._plan.seg_run, 0), self._plan.seg_first[:-1])
        self._payload = max((int(n) for n in sums[: self._plan.num_reads]), default=0)
        width = -(-self._payload // STATUS_BYTES) * STATUS_BYTES + STATUS_BYTES
        self._send = torch.zeros(width, dtype=torch.uint8, device=wire.device)
        self._received = torch.empty(wire.world_size, width, dtype=torch.uint8, device=wire.device)
        self._status: list[torch.Tensor] = []
        self._failed: PenstockError | RuntimeError | None = failed
        self._send[-1] = failed is not None

    def carry_out(self) -> None:
        """Every round; then raise what any rank met."""
        plan, wire = self._plan, self._wire
        num_rounds = -(-plan.num_reads // wire.world_size)
        for k in range(num_rounds):
            own = k * wire.world_size + wire.rank
            if own < plan.num_reads and self._failed is None:
                self._send_own(own)
            wire.gather(self._received.view(-1), self._send)
            self._unpack(k)
            if k % LAG_ROUNDS == LAG_ROUNDS - 1 or k == num_rounds - 1:
                self._look()

    def _send_own(self, read: int) -> None:
        run = self._run
        try:
            run.wait_read(read)
        except (PenstockError, RuntimeError) as error:
            self._failed = error
            self._send[-1] = 1
            return
        at = 0
        for segment in run.segments(read):
            self._send[at : at + segment.run].copy_(self._piece(segment))
            at += segment.run

    def _unpack(self, k: int) -> None:
        """Put the other ranks' chunks where they belong, and keep the status words."""
        wire = self._wire
        for rank in range(wire.world_size):
            read = k * wire.world_size + rank
            if rank == wire.rank or read >= self._plan.num_reads or self._failed is not None:
                continue
            segments, at = self._run.segments(read), 0
            for segment in segments:
                self._piece(segment).copy_(self._received[rank, at : at + segment.run])
                at += segment.run
            self._arrive(segments)
        self._status.append(self._received[:, -1].clone())

    def _arrive(self, segments: Sequence[Segment]) -> None:
        if not self._is_host:
            # The copies run on this stream; a check on another must find them done.
            torch.cuda.current_stream(self._wire.device).synchronize()
        if not self._run.ticket.stopped:
            self._run.arrived(segments)

    def _look(self) -> None:
        """Raise together: the failing rank its own error, the others PeerLost."""
        words = torch.stack(self._status).amax(dim=0).tolist()
        self._status.clear()
        if self._failed is not None:
            raise self._failed
        lost = [rank for rank, word in enumerate(words) if word]
        if lost:
            raise PeerLost(f"ranks {lost} of the group failed to read their part", hint="see those ranks' errors")

    def _piece(self, segment: Segment) -> Any:
        slab = self._slab(segment.slab)
        piece = slab[segment.dst : segment.dst + segment.run]
        return torch.from_numpy(piece) if self._is_host else piece
