"""Runs rounds by number, several at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.harness import Outcome, Round, World
from tests.chaos.kinds import KINDS, kind_of

PLACES = 6
"""Number of places. Rounds wait more than they compute, so two cores run this many at once."""
KEEP = Path(".cache/chaos")


class Places:
    """A number of places. A round may take several, and waits until enough are free."""

    def __init__(self, count: int) -> None:
        self._free, self._count, self._changed = count, count, threading.Condition()

    def take(self, count: int) -> int:
        count = min(count, self._count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        return count

    def give(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()


def run(
    numbers: Sequence[int], seed: int, *, world: World, places: int, until: float, show: bool, keep: Path = KEEP
) -> list[Outcome]:
    """Run rounds by number, several at once, until all are done or no more may start. Return their outcomes."""
    free, outcomes, running = Places(places), list[Outcome](), list[threading.Thread]()
    lock = threading.Lock()

    def one(round_: Round, taken: int) -> None:
        try:
            outcome = round_.execute()
        finally:
            free.give(taken)
        with lock:
            outcomes.append(outcome)
            if show:
                found = "; ".join(f"{each.kind}: {each.text}" for each in outcome.violations) or "held"
                seconds = f"{outcome.seconds:.1f} s, settled in {outcome.settle_s:.1f}"
                head = f"[{len(outcomes)}] round {outcome.number} {outcome.kind} ({seconds})"
                print(f"{head}: {outcome.description}: {found}", flush=True)

    for number in numbers:
        kind = KINDS[kind_of(number)]
        taken = free.take(kind.at_once)
        if time.monotonic() > until:
            free.give(taken)
            break
        thread = threading.Thread(target=one, args=(kind(number, seed, world, keep), taken))
        thread.start()
        running.append(thread)
    for thread in running:
        thread.join()
    return sorted(outcomes, key=lambda outcome: outcome.number)
