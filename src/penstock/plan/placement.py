"""Which worker runs which task next: by expected finish, with stealing, and the last ones run twice.

In: tasks' costs, what workers hold, and events (joined, done, lost) with the caller's clock. Out: assignments.
Not here: processes and messages (`jobs`), what a task is (`tasks`). No clock of its own; deterministic.

    next(worker): its own queue -> the common one -> the tail of who would end last -> a task that runs elsewhere
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import PlanError

DEPTH = 4
"""Tasks a worker has at once: one being read, one copied, one computed, one written."""
GUESS_BYTES_PER_S = 1e9
"""A worker's pace before it ended a task, where nobody's is known; only ratios matter."""
SHARE = 0.3
"""Of the newest task in a worker's pace: three tasks and a change of pace is seen."""
NUM_RUNS = 2
"""Times a task is run at once, at most."""

_FREE, _HELD, _DONE = 0, 1, 2


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One worker as the scheduler knows it; what is summed over workers lies in columns, at `index`."""

    index: int
    given: dict[int, None] = field(default_factory=dict)
    """Tasks it was given and has not ended, in order."""
    own: deque[int] = field(default_factory=deque)
    """Tasks kept for it because their bytes are here; others may steal them."""
    last: float
    """When it last ended a task, or had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a worker is to do."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[tuple[str, int], ...] = ()
    """Workers these were taken from: they need not begin them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What the end of a task means."""

    first: bool
    """Whether its result counts: nobody ended the task before."""
    revoked: tuple[tuple[str, int], ...] = ()
    """Workers that have it too and need not begin it."""


class Placement:
    """The state of one job.

    Args:
        cost: of each task, bytes; tasks are begun in this order.
        depth: tasks a worker is given ahead.
        done: tasks that need not run: of a job that is resumed.

    Attributes:
        num_left: tasks that have not ended.
        num_stolen, num_twice: tasks taken from a worker's queue; tasks begun a second time.
    """

    def __init__(self, cost: Sequence[int], *, depth: int = DEPTH, done: Iterable[int] = ()) -> None:
        self._cost = [max(1, int(c)) for c in cost]
        self._depth = depth
        self._state = bytearray(len(self._cost))
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []
        self._load, self._pace, self._spare = np.zeros(0), np.zeros(0), np.zeros(0, np.int64)
        self._known = np.zeros(0, bool)
        self._running: dict[int, list[str]] = {}
        self._next = 0
        self._back: list[int] = []
        self.num_left = len(self._cost)
        self.num_stolen = self.num_twice = 0
        for task in set(done):
            self._state[task] = _DONE
            self.num_left -= 1

    @property
    def is_done(self) -> bool:
        """Whether every task has ended."""
        return self.num_left == 0

    def join(self, worker: str, now: float, *, holds: Iterable[int] = ()) -> None:
        """A worker came. `holds`: tasks whose inputs it has already, kept for it while others have work.

        Raises:
            PlanError: it is here already.
        """
        if worker in self._workers:
            raise PlanError(f"worker {worker!r} joined twice")
        present = [self._pace[one.index] for one in self._workers.values()]
        new = self._workers[worker] = _Worker(index=len(self._names), last=now)
        self._names.append(worker)
        self._load, self._spare = np.append(self._load, 0.0), np.append(self._spare, 0)
        self._known = np.append(self._known, False)
        self._pace = np.append(self._pace, float(np.median(present)) if present else GUESS_BYTES_PER_S)
        for task in holds:
            if self._state[task] == _FREE:
                self._state[task] = _HELD
                new.own.append(task)
                self._load[new.index] += self._cost[task]
        self._count(new)

    def lost(self, worker: str) -> None:
        """It died, or is taken for dead: what it had is anybody's."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        self._load[gone.index] = self._spare[gone.index] = 0
        for task in [*gone.given, *gone.own]:
            runs = self._running.get(task, [])
            if worker in runs:
                runs.remove(worker)
            if not runs and self._state[task] == _HELD:
                self._running.pop(task, None)
                self._state[task] = _FREE
                heapq.heappush(self._back, task)

    def next(self, worker: str, now: float) -> Given:
        """Tasks for a worker to begin, or to queue, now; none: it has enough, or nothing is left for it."""
        me = self._workers[worker]
        tasks: list[int] = []
        revoked: list[tuple[str, int]] = []
        while len(me.given) < self._depth:
            task = self._take_own(me)
            if task is None:
                task = self._take_common()
            if task is None and (taken := self._steal(me)) is not None:
                task = taken[1]
                revoked.append(taken)
            if task is None and not me.given:
                task = self._twice(worker, me, now)
            if task is None:
                break
            if not me.given:
                me.last = now
            me.given[task] = None
            self._load[me.index] += self._cost[task]
            self._state[task] = _HELD
            self._running.setdefault(task, []).append(worker)
            tasks.append(task)
        self._count(me)
        return Given(tasks=tuple(tasks), revoked=tuple(revoked))

    def done(self, worker: str, task: int, now: float) -> Done:
        """It ended a task: a worker that was lost may still say so, and an end said twice counts once."""
        me = self._workers.get(worker)
        if me is not None and task in me.given:
            self._measured(me, self._cost[task] / max(now - me.last, 1e-9))
            me.last = now
            self._drop(me, task)
        if self._state[task] == _DONE:
            return Done(first=False)
        self._state[task] = _DONE
        self.num_left -= 1
        others = tuple((one, task) for one in self._running.pop(task, []) if one != worker)
        for one, _ in others:
            self._drop(self._workers[one], task)
        return Done(first=True, revoked=others)

    def given(self, worker: str) -> tuple[int, ...]:
        """What it was given and has not ended."""
        return tuple(self._workers[worker].given)

    # -- where a task comes from

    def _take_own(self, me: _Worker) -> int | None:
        while me.own:
            task = me.own.popleft()
            self._load[me.index] -= self._cost[task]
            if self._state[task] != _DONE:
                return task
        return None

    def _take_common(self) -> int | None:
        while self._back:
            task = heapq.heappop(self._back)
            if self._state[task] == _FREE:
                return task
        while self._next < len(self._cost):
            task, self._next = self._next, self._next + 1
            if self._state[task] == _FREE:
                return task
        return None

    def _steal(self, me: _Worker) -> tuple[str, int] | None:
        """The last task of who would end last, if it ends sooner here; and whose it was."""
        while True:
            ends = np.where(self._spare > 0, self._load / self._pace, -1.0)
            ends[me.index] = -1.0
            worst = int(ends.argmax())
            if ends[worst] < 0:
                return None
            name = self._names[worst]
            victim = self._workers[name]
            task = victim.own[-1] if victim.own else next(reversed(victim.given))
            is_done = self._state[task] == _DONE
            if not is_done and (self._load[me.index] + self._cost[task]) / self._pace[me.index] >= ends[worst]:
                return None
            if victim.own:
                victim.own.pop()
                self._load[worst] -= self._cost[task]
                self._count(victim)
            else:
                self._drop(victim, task)
                self._running[task].remove(name)
            if not is_done:
                self.num_stolen += 1
                return name, task

    def _twice(self, worker: str, me: _Worker, now: float) -> int | None:
        """The task that runs elsewhere and would gain most by being begun here too, if any would."""
        best, best_s = None, 0.0
        for name, other in self._workers.items():
            task = next(iter(other.given), None)
            if name == worker or task is None:
                continue
            runs = self._running[task]
            if len(runs) >= NUM_RUNS or worker in runs:
                continue
            here_s, passed_s = self._cost[task] / self._pace[me.index], now - other.last
            # What took longer than its worker's pace says takes as long again.
            gain_s = max(self._cost[task] / self._pace[other.index] - passed_s, passed_s) - here_s
            if gain_s > best_s:
                best, best_s = task, gain_s
        self.num_twice += best is not None
        return best

    def _measured(self, one: _Worker, pace: float) -> None:
        """Its newest pace; the first of all is also that of workers nothing is known of."""
        if not self._known.any():
            self._pace[:] = pace
        self._pace[one.index] += (SHARE if self._known[one.index] else 1.0) * (pace - self._pace[one.index])
        self._known[one.index] = True

    def _drop(self, one: _Worker, task: int) -> None:
        if task in one.given:
            del one.given[task]
            self._load[one.index] -= self._cost[task]
            self._count(one)

    def _count(self, one: _Worker) -> None:
        """How many tasks may be stolen from it: not the one it is at."""
        self._spare[one.index] = len(one.own) + max(0, len(one.given) - 1)
