"""The exchange of bytes between the ranks of a group, so that only one rank reads each byte.

The bytes are an ordered list of *turns*, which the ranks read in rotation. In each round, every rank sends its turn
with a status word, and receives the turns of all ranks. A rank that has not yet read its turn sends BUSY, and then the
round is repeated. A failed rank still joins the round, so that all ranks raise after the same round. All rounds of an
exchange have the same size, and shorter turns are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from penstock.errors import DestinationError, PenstockError
from penstock.ranks.agreement import BUSY, FAILED, READY, RankWords

STATUS_BYTES = 512
"""Bytes reserved for the status word after each turn, so that turns stay aligned for copy engines."""

ROUND_BYTES = 32 << 20
"""Bytes that a rank contributes to a round on CUDA. Large rounds amortise the fixed costs of NCCL and Python."""

BUSY_S = 1.0
"""Seconds after which a rank that cannot continue sends BUSY, so that the other ranks do not consider it lost."""

_FAILURES = (PenstockError, OSError, RuntimeError, MemoryError)
"""Errors that a rank reports to the other ranks. Torch raises RuntimeError."""


class RankPart(Protocol):
    """One rank's part in an exchange: it reads the turns of this rank, and keeps the turns of the other ranks.

    An error of any method makes all ranks raise after the same round.
    """

    def begin(self) -> None:
        """Start to read the turns of this rank."""

    def fill(self, k: int, payload: torch.Tensor, timeout_s: float) -> bool:
        """Wait until this rank has its turn of round `k` in `payload`, and can keep the round. False is a timeout."""

    def keep(self, k: int, payloads: torch.Tensor) -> None:
        """Copy the payloads, a row for each rank, to their destination.

        On a device, only queue the copies. They are queued before the words are known, and again in a repeated round.
        """

    def arrived(self, k: int) -> None:
        """Record that the bytes of round `k` are at their destination."""


def reads_per_turn(device: torch.device, max_read_bytes: int, limit_bytes: int = ROUND_BYTES) -> int:
    """Return the number of reads in a turn, whose limit in bytes on CUDA is `limit_bytes`."""
    # On the CPU the host waits for each round, so a larger round would only use more memory.
    return 1 if device.type == "cpu" else max(1, min(limit_bytes, ROUND_BYTES) // max_read_bytes)


class RankExchange:
    """One exchange of a group's ranks.

    Args:
        turn_nbytes: size in bytes of each turn. All ranks have the same turns, and take them in rotation.

    Attributes:
        num_rounds: number of rounds.
        width: size in bytes of what a rank sends in each round.
    """

    def __init__(self, ranks: RankWords, turn_nbytes: Sequence[int]) -> None:
        self._ranks = ranks
        self._is_host = ranks.device.type == "cpu"
        self.num_rounds = -(-len(turn_nbytes) // ranks.world_size)
        # A gather requires the same width on all ranks.
        self.width = -(-max(turn_nbytes, default=0) // STATUS_BYTES) * STATUS_BYTES + STATUS_BYTES
        self._payloads: list[torch.Tensor] = []
        self._slots: list[_Slot] = []
        self._failed: BaseException | None = None

    def turns(self, k: int) -> range:
        """Return the turns of round `k`, by rank. In the last round, the last ranks may have no turn."""
        return range(k * self._ranks.world_size, (k + 1) * self._ranks.world_size)

    def payload(self, k: int) -> torch.Tensor:
        """Return the memory for this rank's turn of round `k`, which is free `num_payloads` rounds later."""
        return self._payloads[k % len(self._payloads)][:-STATUS_BYTES]

    def prepare(self, digest: bytes, *, num_payloads: int, num_in_flight: int = 1) -> None:
        """Allocate the buffers, and agree on `digest` with the other ranks. Collective. See `RankWords.agree`.

        Args:
            num_payloads: number of rounds for which this rank has memory, so that turns can be read ahead.
            num_in_flight: number of rounds that are queued on a device.
        """
        shape, device = (num_payloads, self.width), self._ranks.device
        with self._ranks.reports_failure():
            try:
                self._payloads = list(torch.empty(shape, dtype=torch.uint8, device=device))
                self._slots = [_Slot(self._ranks, self.width) for _ in range(num_in_flight)]
            except (RuntimeError, MemoryError) as error:
                message = f"cannot allocate the buffers of the exchange: {error}"
                raise DestinationError(message, hint="free memory, or lower memory_bytes") from error
        self._ranks.agree(digest=digest)

    def carry_out(self, part: RankPart) -> None:
        """Exchange all rounds. Collective. Raise the error of this rank, or PeerLost for the error of another rank.

        On a device, the current stream must be the same as in `prepare`.
        """
        try:
            self._attempt(part.begin)
            for k in range(self.num_rounds + len(self._slots)):
                slot = self._slots[k % len(self._slots)]
                while slot.k is not None and not self._end(part, slot, slot.k):
                    self._begin(part, slot, slot.k)
                if k < self.num_rounds:
                    self._begin(part, slot, k)
            if self._failed is not None:
                raise self._failed
        finally:
            # The caller may keep this object much longer than it needs the buffers.
            self._payloads, self._slots = [], []

    def _begin(self, part: RankPart, slot: _Slot, k: int) -> None:
        """Send this rank's turn and start the gather. On a device, also queue the copies to their destination."""
        slot.k = k
        payload = self._payloads[k % len(self._payloads)]
        is_filled = self._attempt(part.fill, k, payload[:-STATUS_BYTES], min(BUSY_S, self._ranks.stall_s / 4))
        # A rank that failed continues with the rounds, because leaving a collective would block the other ranks.
        payload[-1] = FAILED if self._failed is not None else READY if is_filled else BUSY
        slot.work = self._ranks.post_gather(slot.received.view(-1), payload)
        if not self._is_host:
            # On CUDA, `join` orders the stream after the gather, and the host continues at once.
            self._ranks.join(slot.work)
            self._attempt(part.keep, k, slot.received)
            # Copy the status words to pinned memory last, because reading them on the device would wait for the round.
            slot.status.copy_(slot.received[:, -1], non_blocking=True)
            slot.done.record()

    def _end(self, part: RankPart, slot: _Slot, k: int) -> bool:
        """Wait for a round and keep it. Return False if a rank was busy. Raise on all ranks if a rank failed."""
        # Poll with a deadline, because a rank that hangs never enters its collective.
        self._ranks.finish(slot.work)
        if self._is_host:
            slot.status.copy_(slot.received[:, -1])
        else:
            self._ranks.wait(slot.done.query)
        words = slot.status.tolist()
        if FAILED in words:
            # Raises on every rank, with the reasons of the failed ranks.
            self._ranks.agree(error=self._failed)
        if BUSY in words:
            return False
        if self._is_host:
            self._attempt(part.keep, k, slot.received)
        self._attempt(part.arrived, k)
        slot.k = None
        return True

    def _attempt(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step of this rank's part, unless the rank failed. The next round reports an error of the step."""
        if self._failed is None:
            try:
                return step(*arguments)
            except _FAILURES as error:
                self._failed = error
        return None


class _Slot:
    """The memory of a round in flight."""

    def __init__(self, ranks: RankWords, width: int) -> None:
        cuda = ranks.device.type == "cuda"
        self.received = torch.empty(ranks.world_size, width, dtype=torch.uint8, device=ranks.device)
        self.status = torch.zeros(ranks.world_size, dtype=torch.uint8, pin_memory=cuda)
        self.done: Any = torch.cuda.Event() if cuda else None
        self.work: Any = None
        self.k: int | None = None
