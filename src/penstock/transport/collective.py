"""Ranks of a torch.distributed group in step: its collectives, each with a deadline, and broadcasts of regions by them.

In: tensors of the same bytes on every rank, a root. Out: the root's bytes in all of them, or an error on every rank.
Not here: one-sided reads (`protocol`, beside which this stands), loads by a group (`loader.group`, over `GroupWire`).

    agree (all_gather: layout, anyone failed?) -> chunks, in place, a window in flight -> agree again

Every wait has a deadline. A rank that fails before or between says so where the ranks agree; one that dies or falls
silent leaves the others with PeerLost within `stall_s`, after which the group (of NCCL) is aborted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PenstockError, PlanError
from penstock.types import MIB

CHUNK_BYTES = 64 * MIB
"""One broadcast: long beside a collective's fixed cost, short beside a stall."""
WINDOW = 4
"""Broadcasts in flight."""
_DIGEST_BYTES = 32

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupWire:
    """A group's collectives, each with a deadline. Order: every rank makes the same calls, in the same order.

    Args:
        group: of gloo for host memory, of NCCL for devices.
        device: of what is exchanged.
        stall_s: seconds of silence after which the others count as lost.
    """

    poll_s = 5e-5
    """Between two looks at a collective."""
    is_its_own = True
    """Whether nobody else uses the group: then it is aborted where a rank is lost, so that nothing is left running."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stall_s: float) -> None:
        self.group, self.device, self.stall_s = group, device, stall_s
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not a rank of the group")

    def gather_words(self, own: bytes) -> list[bytes]:
        """Every rank's word, all of one length, by rank."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        found = torch.empty(self.world_size * len(own), dtype=torch.uint8, device=self.device)
        self.finish(self.post_gather(found, mine))
        return [bytes(row.tolist()) for row in found.cpu().view(self.world_size, -1)]

    def post_gather(self, into: torch.Tensor, own: torch.Tensor) -> Any:
        """As `post`: an all_gather."""
        return self.post(_all_gather, into, own)

    def post(self, call: Callable[..., Any], *given: Any) -> Any:
        """Start a collective on the current stream; its work. PeerLost when the group is broken."""
        try:
            return call(*given, group=self.group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def finish(self, work: Any) -> None:
        """Wait for a posted collective, and raise what it met."""
        self.wait(work.is_completed)
        try:
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Return when done. PeerLost when a rank fails or is silent for `stall_s`."""
        deadline = time.monotonic() + self.stall_s
        try:
            while not is_done():
                if time.monotonic() > deadline:
                    raise self._lost(f"another rank of the group was silent for {self.stall_s} s")
                time.sleep(self.poll_s)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> PeerLost:
        # torch.distributed reports a lost peer as RuntimeError or a subclass (DistBackendError).
        if self.is_its_own and self.device.type == "cuda":
            self.group.abort()
        return PeerLost(f"rank {self.rank}: {why}", hint="see the other ranks' errors; make a new process group")


class CollectiveTransport(GroupWire):
    """See `GroupWire`. Not a `Transport`: every rank takes part in every call. The group is used by nobody else."""

    name = "collective"

    def broadcast(
        self,
        regions: Sequence[torch.Tensor],
        *,
        root: int,
        arrived: Callable[[int, int], None] | None = None,
        failed: PenstockError | None = None,
    ) -> None:
        """Have the root's bytes in every rank's regions, in place.

        Args:
            regions: contiguous tensors on the device, of the same bytes on every rank.
            root: rank in the group that has the bytes.
            arrived: called with (region, bytes of it that are there) as they come, on this rank's thread.
            failed: what kept this rank from taking part; the others hear of it, and it is raised here.

        Raises:
            PlanError: the ranks' regions or roots differ; on every rank, nothing touched.
            PeerLost: another rank failed or was silent for `stall_s`; `mutated` says if bytes were written.

        Order: collective. After PeerLost by silence the group is aborted.
        """
        flat: list[torch.Tensor] = []
        moved = False
        try:
            if failed is None:
                flat = [self._flat(region) for region in regions]
        except PlanError as error:
            failed = error
        try:
            self._agree([part.numel() for part in flat], root, failed)
            moved = True
            failed = self._move(flat, root, arrived)
            self._agree([], root, failed)
        except PenstockError as error:
            error.mutated = moved and self.rank != root
            raise

    def _flat(self, region: torch.Tensor) -> torch.Tensor:
        if not region.is_contiguous() or region.device.type != self.device.type:
            raise PlanError(f"a region must be contiguous on {self.device}")
        return region.detach().view(-1).view(torch.uint8) if region.numel() else region.new_empty(0, dtype=torch.uint8)

    def _move(
        self, flat: list[torch.Tensor], root: int, arrived: Callable[[int, int], None] | None
    ) -> PenstockError | None:
        """Every chunk; what `arrived` raised, which ends nobody's broadcast: the ranks stay in step."""
        flying: list[tuple[Any, int, int]] = []
        failed: PenstockError | None = None
        source = dist.get_global_rank(self.group, root)
        for index, part in enumerate(flat):
            for start in range(0, part.numel(), CHUNK_BYTES):
                chunk = part[start : start + CHUNK_BYTES]
                flying.append((self.post(dist.broadcast, chunk, source), index, start + chunk.numel()))
                if len(flying) >= WINDOW:
                    failed = self._land(flying, arrived, failed)
        while flying:
            failed = self._land(flying, arrived, failed)
        return failed

    def _land(
        self,
        flying: list[tuple[Any, int, int]],
        arrived: Callable[[int, int], None] | None,
        failed: PenstockError | None,
    ) -> PenstockError | None:
        work, index, nbytes = flying.pop(0)
        self.finish(work)
        if arrived is not None and failed is None:
            try:
                arrived(index, nbytes)
            except PenstockError as error:
                return error
        return failed

    def _agree(self, nbytes: list[int], root: int, failed: PenstockError | None) -> None:
        """Go on only if all ranks mean the same and none failed."""
        digest = hashlib.blake2b(repr((root, nbytes)).encode(), digest_size=_DIGEST_BYTES).digest()
        words = self.gather_words(digest + bytes([failed is not None]))
        if failed is not None:
            raise failed
        if lost := [rank for rank, word in enumerate(words) if word[-1]]:
            raise PeerLost(f"ranks {lost} of the group failed", hint="see those ranks' errors")
        if odd := [rank for rank, word in enumerate(words) if word != words[0]]:
            raise PlanError(f"ranks {odd} have other regions or another root than rank 0", hint="give all the same")
