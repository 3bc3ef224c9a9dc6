"""Statistics of memory tiers: bytes in each, and moves over each link between them.

In / Out: frozen values. Not here: counting (`tiers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The use of one tier now; `used_bytes` are of rooms, rounded up to the tier's unit."""

    num_blocks: int
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """The moves in one direction between two tiers, so far."""

    num_moves: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Return the rate in GB/s; 0 where nothing took time."""
        return self.nbytes / GB / self.seconds if self.seconds else 0.0

    def plus(self, nbytes: int, seconds: float) -> LinkStats:
        """Return the same with one more move."""
        return LinkStats(num_moves=self.num_moves + 1, nbytes=self.nbytes + nbytes, seconds=self.seconds + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersStats:
    """Statistics of all tiers and links."""

    tiers: Mapping[str, TierStats]
    """By name, fastest first."""
    links: Mapping[tuple[str, str], LinkStats]
    """From tier, to tier; `source` is one."""
    hits: int
    """Requests for blocks that were there."""
    misses: int
