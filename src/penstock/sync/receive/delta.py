"""Digests of the last version in this receiver's memory, so that only changed strips are read.

In: for each step of a transfer the last verified digests, and those of the next version. Out: the strips to read, and
the reason.
Not here: reading and verifying (`transfer`): a strip that is not read is digested like one that was, so the stored
digests only decide what to skip, and are never trusted.

    first run: everything is read, and its digests stored -> next run: digests are requested before a step is read, and
    only strips that differ are read. Then the measured density and bandwidth decide whether to request digests first;
    if not, they are requested while everything is read.
"""

from __future__ import annotations

import numpy as np

from penstock.sync.receive.batches import Step, some_of
from penstock.sync.receive.stats import TransferReport
from penstock.types import GB, U64

CUT_S = 50e-6
"""Time to select some strips of a step: about twenty numpy calls."""


def pays(nbytes: int, changed_bytes: float, bytes_per_s: float, cost_s: float) -> bool:
    """Return whether spending `cost_s` and reading only the changed bytes is quicker than reading all.

    Args:
        bytes_per_s: the measured rate of the wire; 0: not known, and the answer is False.
    """
    return bytes_per_s > 0 and (nbytes - changed_bytes) / bytes_per_s > cost_s


class Delta:
    """The digests of one `Transfer`: of one plan's key, and one receiver's memory.

    Attributes:
        asks_first: whether this run requests a step's digests before it reads the step.
        density: the share of bytes in strips that changed at the last version; None: not measured yet.
    """

    def __init__(self) -> None:
        self.asks_first = False
        self.density: float | None = None
        self._digests: dict[Step, U64] = {}
        # A read that failed midway leaves strips of two versions: the stored digests of its step are then worthless.
        self._unsure: set[Step] = set()
        self._bytes_per_s = self._ask_s = 0.0
        self._changed_bytes = 0
        self._is_whole = False
        self._why = ""

    def begin(self, nbytes: int) -> None:
        """Start a run of `nbytes`, and decide whether it requests digests first."""
        self._changed_bytes, self._is_whole = 0, bool(self._digests)
        if not self._digests:
            self.asks_first, self._why = False, "this plan has received no version yet"
        elif self.density is None:
            self.asks_first, self._why = True, "the share of changed bytes is being measured"
        else:
            # By the last version's density: training steps of one run change about the same share of the weights.
            self.asks_first = pays(nbytes, self.density * nbytes, self._bytes_per_s, self._ask_s)
            word = "pays" if self.asks_first else "does not pay"
            self._why = (
                f"{self.density:.0%} changed the last time: at {self._bytes_per_s / GB:.1f} GB/s, and "
                f"{self._ask_s:.3f} s for digests, reading only changes {word}"
            )

    def lacking(self, step: Step, wanted: U64) -> Step | None:
        """Return the strips of a step that must be read because they changed: all, some, or None for no strips."""
        known = None if step in self._unsure else self._digests.get(step)
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
        """Store the digests that this receiver's memory was verified to have."""
        before = self._digests.get(step)
        if before is None:
            self._is_whole = False  # the change of this step is unknown, so this run measures no density
        else:
            self._changed_bytes += int(step.ours.nbytes[before != digests].sum())
        self._digests[step] = digests
        self._unsure.discard(step)

    def ended(self, report: TransferReport) -> None:
        """Note the figures of a run that completed, for the decision of the next."""
        if self._is_whole and report.nbytes:
            self.density = self._changed_bytes / report.nbytes
        if report.moved_bytes and report.wire_s > 0:
            self._bytes_per_s = report.moved_bytes / report.wire_s
        self._ask_s = max((link.ready_s for link in report.links), default=0.0)

    def summary(self, report: TransferReport) -> str:
        """Return a line of text about the last run."""
        return f"delta: moved {report.moved_bytes} of {report.nbytes} bytes, {self._why}"
