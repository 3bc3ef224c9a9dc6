"""Collectives of a torch.distributed group, each with a deadline. torch.distributed itself has no useful deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PlanError

# torch 2.13 renamed this function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupCollectives:
    """Collectives of a group. If a rank dies or is silent for `stall_s`, the other ranks raise PeerLost.

    Every rank must make the same calls in the same order. The gloo (host memory) or NCCL (devices) group belongs to
    the caller and is never aborted. The exchanged tensors are on `device`.
    """

    poll_s = 0.01
    """Seconds between two polls of a collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stall_s: float) -> None:
        self.group = group
        self.device = device
        self.stall_s = stall_s
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not a rank of the group")

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank. All ranks must pass the same number of bytes."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        gathered = torch.empty(self.world_size * len(own), dtype=torch.uint8, device=self.device)
        self.finish(self.post_gather(gathered, mine))
        return [row.numpy().tobytes() for row in gathered.cpu().view(self.world_size, -1)]

    def post_gather(self, into: torch.Tensor, own: torch.Tensor) -> Any:
        """Start an all_gather; see `post`."""
        return self.post(_all_gather, into, own)

    def post(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Start a collective on the current stream and return its work. Raises PeerLost if the group is broken."""
        try:
            return call(*arguments, group=self.group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def finish(self, work: Any) -> None:
        """Wait for a posted collective. Raises PeerLost if the collective failed or stalled for `stall_s`."""
        self.wait(work.is_completed)
        # A completed collective may have failed, and only `wait` raises the error.
        try:
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. Raises PeerLost if a rank fails or is silent for `stall_s`."""
        # Poll, since torch's timeout is minutes long for a whole group and its blocking wait cannot be interrupted.
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
        hint = "check the errors of the other ranks, and create a new process group"
        return PeerLost(f"rank {self.rank}: {why}", hint=hint)
