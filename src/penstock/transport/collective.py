"""Regions of one rank's memory broadcast to all ranks of a torch.distributed group, for fleets that start in step.

In: tensors of the same bytes on every rank, a root. Out: the root's bytes in all of them, or an error on every rank.
Not here: one-sided reads (`protocol`, beside which this stands), which rank has what (`fleet`).

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
_POLL_S = 5e-5
_WORD_BYTES = 33

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveTransport:
    """A group and the device of its memory. Not a `Transport`: every rank takes part in every call, in the same order.

    Args:
        group: of gloo for host memory, of NCCL for devices; used by nobody else meanwhile.
        device: of the regions.
        stall_s: seconds of silence after which the others count as lost.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, stall_s: float) -> None:
        self._group, self._device, self._stall_s = group, device, stall_s
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not a rank of the group")

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
        if not region.is_contiguous() or region.device.type != self._device.type:
            raise PlanError(f"a region must be contiguous on {self._device}")
        return region.detach().view(-1).view(torch.uint8) if region.numel() else region.new_empty(0, dtype=torch.uint8)

    def _move(
        self, flat: list[torch.Tensor], root: int, arrived: Callable[[int, int], None] | None
    ) -> PenstockError | None:
        """Every chunk; what `arrived` raised, which ends nobody's broadcast: the ranks stay in step."""
        flying: list[tuple[Any, int, int]] = []
        failed: PenstockError | None = None
        source = dist.get_global_rank(self._group, root)
        for index, part in enumerate(flat):
            for start in range(0, part.numel(), CHUNK_BYTES):
                chunk = part[start : start + CHUNK_BYTES]
                flying.append((self._post(dist.broadcast, chunk, source), index, start + chunk.numel()))
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
        self._wait(work)
        if arrived is not None and failed is None:
            try:
                arrived(index, nbytes)
            except PenstockError as error:
                return error
        return failed

    def _agree(self, nbytes: list[int], root: int, failed: PenstockError | None) -> None:
        """Go on only if all ranks mean the same and none failed."""
        digest = hashlib.blake2b(repr((root, nbytes)).encode(), digest_size=_WORD_BYTES - 1).digest()
        mine = torch.frombuffer(bytearray(digest + bytes([failed is not None])), dtype=torch.uint8).to(self._device)
        found = torch.empty(self.world_size * _WORD_BYTES, dtype=torch.uint8, device=self._device)
        self._wait(self._post(_all_gather, found, mine))
        words = [bytes(row.tolist()) for row in found.cpu().view(self.world_size, -1)]
        if failed is not None:
            raise failed
        if lost := [rank for rank, word in enumerate(words) if word[-1]]:
            raise PeerLost(f"ranks {lost} of the group failed", hint="see those ranks' errors")
        if odd := [rank for rank, word in enumerate(words) if word != words[0]]:
            raise PlanError(f"ranks {odd} have other regions or another root than rank 0", hint="give all the same")

    def _post(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def _wait(self, work: Any) -> None:
        deadline = time.monotonic() + self._stall_s
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise self._lost(f"another rank was silent for {self._stall_s} s")
                time.sleep(_POLL_S)
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> PeerLost:
        """The error, with the group aborted, so that nothing of it is left running on a device."""
        if self._device.type == "cuda":
            self._group.abort()
        return PeerLost(f"rank {self.rank}: {why}", hint="see the other ranks' errors; make a new process group")
