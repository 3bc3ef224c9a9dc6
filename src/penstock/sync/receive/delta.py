"""Track the strips of the version before in our memory, so that only changed strips are read.

In: per step of a take the digests proven last, and those of the next version. Out: which strips are read, and why.
Not here: reading, and proving (`transfer`): a strip that is not read is digested here like one that was, so what is
kept says what to skip, and is never trusted.

    first run: all read; digests kept -> next: sources are asked before their steps are read; strips that differ are
    Then density and bandwidth, measured, say whether to ask first: else digests are asked for while all is read.
"""

from __future__ import annotations

import numpy as np

from penstock.sync.receive.batches import Step, some_of
from penstock.sync.receive.stats import TransferReport
from penstock.types import GB, U64

CUT_S = 50e-6
"""What it takes to cut a step: some twenty numpy calls."""


def pays(nbytes: int, changed_bytes: float, bytes_per_s: float, cost_s: float) -> bool:
    """Return whether spending `cost_s` and reading the changed bytes is quicker than reading all.

    Args:
        bytes_per_s: of the wire, measured; 0: not known, so that nothing pays.
    """
    return bytes_per_s > 0 and (nbytes - changed_bytes) / bytes_per_s > cost_s


class Delta:
    """The digests of one `Transfer`: of one plan's key, and one receiver's memory.

    Attributes:
        asks_first: whether this run asks a source before it reads a step of it.
        density: bytes in strips that changed, of all, at the last version; None: not measured yet.
    """

    def __init__(self) -> None:
        self.asks_first, self.density = False, None  # type: tuple[bool, float | None]
        self._told: dict[Step, U64] = {}
        self._unsure: set[Step] = set()
        self._bytes_per_s = self._ask_s = 0.0
        self._changed_bytes, self._is_whole, self._why = 0, False, ""

    def begin(self, nbytes: int) -> None:
        """A run of so many bytes."""
        self._changed_bytes, self._is_whole = 0, bool(self._told)
        if not self._told:
            self.asks_first, self._why = False, "no version is held by this plan yet"
        elif self.density is None:
            self.asks_first, self._why = True, "what changed is found out"
        else:
            self.asks_first = pays(nbytes, self.density * nbytes, self._bytes_per_s, self._ask_s)
            word = "pays" if self.asks_first else "does not pay"
            self._why = (
                f"{self.density:.0%} changed the last time: at {self._bytes_per_s / GB:.1f} GB/s, and "
                f"{self._ask_s:.3f} s for digests, it {word}"
            )

    def lacking(self, step: Step, wanted: U64) -> Step | None:
        """Return the strips of a step that must be read because they changed: all, some, or None."""
        known = None if step in self._unsure else self._told.get(step)
        if known is None:
            return step
        changed = known != wanted
        if not changed.any():
            return None
        changed_bytes = int(step.ours.nbytes[changed].sum())
        if not pays(step.nbytes, changed_bytes, self._bytes_per_s, CUT_S):
            return step
        return some_of(step, np.flatnonzero(changed))

    def reading(self, step: Step) -> None:
        """Treat a step's bytes as unknown until they are verified again. Order: before the first byte is read."""
        self._unsure.add(step)

    def proven(self, step: Step, digests: U64) -> None:
        """Keep the digests that our memory was verified to have."""
        before = self._told.get(step)
        if before is None:
            self._is_whole = False
        else:
            self._changed_bytes += int(step.ours.nbytes[before != digests].sum())
        self._told[step] = digests
        self._unsure.discard(step)

    def ended(self, found: TransferReport) -> None:
        """The run is over, and whole."""
        if self._is_whole and found.nbytes:
            self.density = self._changed_bytes / found.nbytes
        if found.moved_bytes and found.wire_s > 0:
            self._bytes_per_s = found.moved_bytes / found.wire_s
        self._ask_s = max((link.ready_s for link in found.links), default=0.0)

    def summary(self, found: TransferReport) -> str:
        """Return a line about the last run, for people."""
        return f"delta: moved {found.moved_bytes} of {found.nbytes} bytes, {self._why}"
