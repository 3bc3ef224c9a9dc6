"""Collectives of a torch.distributed group, each with a deadline. torch.distributed itself has no useful deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PlanError

# torch 2.13 renamed this function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

POLL_S = 1e-3
"""Seconds between two checks of a collective, about half of a round of a load. Each check takes the GIL from the thread
that reads."""


class GroupCollectives:
    """Collectives of a group. If a rank dies or is silent for `stall_s`, the other ranks raise PeerLost.

    Every rank must make the same calls in the same order. The gloo (host memory) or NCCL (devices) group belongs to
    the caller and is never aborted. The exchanged tensors are on `device`. A wait checks its collective every `poll_s`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, stall_s: float, *, poll_s: float = POLL_S
    ) -> None:
        self.group = group
        self.device = device
        self.stall_s = stall_s
        self._poll_s = poll_s
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
        self.join(work)

    def join(self, work: Any) -> None:
        """Let the current stream wait for a posted collective, without a deadline. On the CPU, this thread waits."""
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
                time.sleep(self._poll_s)
        except (RuntimeError, ValueError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> PeerLost:
        # torch.distributed reports a lost peer as RuntimeError or a subclass (DistBackendError).
        hint = "check the errors of the other ranks, and create a new process group"
        return PeerLost(f"rank {self.rank}: {why}", hint=hint)


_own_groups: dict[str, dist.ProcessGroup] = {}
"""Separate groups, by the name of the group with the same ranks. None is ever destroyed, because NCCL takes a second
to create a group, and a new group with the same name would find the addresses of a destroyed one."""


def own_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Return a separate group with the same ranks for Penstock's collectives. The first call is collective."""
    name = group.group_name
    own = _own_groups.get(name)
    if own is not None:
        try:
            dist.get_rank(own)
        except (RuntimeError, ValueError):
            # torch.distributed was shut down and initialised again.
            own = None
    if own is None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks,
            backend=dist.get_backend(group),
            timeout=timedelta(seconds=max(60.0, timeout_s)),
            # Without this option, every rank in the world would have to make this call.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        _own_groups[name] = own
    return own


def forget_group(own: dist.ProcessGroup) -> None:
    """Make the next load create a new group. The old group is not destroyed, because NCCL may wait for a lost rank."""
    for name in [name for name, group in _own_groups.items() if group is own]:
        del _own_groups[name]
