"""Which worker runs which task next: by expected finish, with stealing, and the last ones run twice.

In: tasks' costs, what workers hold, and events (joined, done, lost) with the caller's clock. Out: assignments.
Not here: processes and messages (`jobs`), what a task is (`tasks`). No clock of its own; deterministic.

    next(worker): what is kept where it is -> the common queue -> the tail of who would end last -> what runs elsewhere
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from penstock.errors import PlanError

DEPTH = 4
"""Tasks a worker has at once: one being read, one copied, one computed, one written."""
DEVICE_DEPTH = 12
"""Of a worker with a device, whose copies and kernels take their time while threads go on.
Source: benchmarks/results/h200x2_202611/convert.md."""
GUESS_BYTES_PER_S = 1e9
"""A worker's pace before it ended a task, where nobody's is known; only ratios matter."""
SHARE = 0.3
"""Of the newest task in a worker's pace: three tasks and a change of pace is seen."""
NUM_RUNS = 2
"""Times a task is run at once, at most."""

_FREE, _KEPT, _GIVEN, _DONE = range(4)


def depth_of(devices: Iterable[str]) -> int:
    """Tasks that a worker on one of these devices is given ahead."""
    return DEPTH if all(one == "cpu" for one in devices) else DEVICE_DEPTH


@dataclass(slots=True, kw_only=True)
class _Place:
    """A tier that workers share, as those of one host its cache: tasks whose bytes are in it."""

    kept: dict[int, None] = field(default_factory=dict)
    """They are in no worker's queue yet, in order; others may steal them."""
    cost: int = 0
    """Of all these."""
    workers: list[_Worker] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One worker as the scheduler knows it; what is compared over all workers lies in lists, at `index`."""

    index: int
    given: dict[int, None] = field(default_factory=dict)
    """Tasks it was given and has not ended, in order."""
    place: _Place
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
        num_stolen, num_twice: tasks taken from where they were queued or kept; tasks begun a second time.
    """

    def __init__(self, cost: Sequence[int], *, depth: int = DEPTH, done: Iterable[int] = ()) -> None:
        self._cost = [max(1, int(c)) for c in cost]
        self._depth = depth
        self._state = bytearray(len(self._cost))
        self._workers: dict[str, _Worker] = {}
        self._places: dict[str, _Place] = {}
        self._keepers: dict[int, list[_Place]] = {}
        self._names: list[str] = []
        self._load: list[int] = []
        self._pace: list[float] = []
        self._spare: list[int] = []
        self._known: list[bool] = []
        self._is_any_known = False
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

    def join(self, worker: str, now: float, *, holds: Iterable[int] = (), at: str = "") -> None:
        """A worker came.

        Args:
            holds: tasks whose inputs are where it is, kept for those who are there while others have work.
            at: where that is; empty: nobody else is there.

        Raises:
            PlanError: it is here already.
        """
        if worker in self._workers:
            raise PlanError(f"worker {worker!r} joined twice")
        present = [self._pace[one.index] for one in self._workers.values()]
        place = self._places.setdefault(at or f"worker {worker}", _Place())
        new = self._workers[worker] = _Worker(index=len(self._names), place=place, last=now)
        place.workers.append(new)
        self._names.append(worker)
        self._load.append(0)
        self._spare.append(0)
        self._known.append(False)
        self._pace.append(median(present) if present else GUESS_BYTES_PER_S)
        for task in holds:
            if self._state[task] in {_FREE, _KEPT} and task not in place.kept:
                self._state[task] = _KEPT
                self._keepers.setdefault(task, []).append(place)
                place.kept[task] = None
                place.cost += self._cost[task]

    def lost(self, worker: str) -> None:
        """It died, or is taken for dead: what it had is anybody's."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        self._load[gone.index] = self._spare[gone.index] = 0
        for task in gone.given:
            runs = self._running.get(task, [])
            if worker in runs:
                runs.remove(worker)
            if not runs and self._state[task] == _GIVEN:
                self._running.pop(task, None)
                self._free(task)
        gone.place.workers.remove(gone)
        if not gone.place.workers:
            for task in list(gone.place.kept):
                self._keepers[task].remove(gone.place)
                if not self._keepers[task]:
                    del self._keepers[task]
                    self._free(task)
            gone.place.kept.clear()
            gone.place.cost = 0

    def next(self, worker: str, now: float) -> Given:
        """Tasks for a worker to begin, or to queue, now; none: it has enough, or nothing is left for it."""
        me = self._workers[worker]
        tasks: list[int] = []
        revoked: list[tuple[str, int]] = []
        while len(me.given) < self._depth:
            task = next(iter(me.place.kept), None)
            if task is None:
                task = self._take_common()
            if task is None:
                task = self._steal(me, revoked)
            if task is None and not me.given:
                task = self._twice(worker, me, now)
            if task is None:
                break
            if not me.given:
                me.last = now
            me.given[task] = None
            self._load[me.index] += self._cost[task]
            self._keep_no_more(task)
            self._state[task] = _GIVEN
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
        self._keep_no_more(task)
        self._state[task] = _DONE
        self.num_left -= 1
        others = tuple((one, task) for one in self._running.pop(task, []) if one != worker)
        for one, _ in others:
            self._drop(self._workers[one], task)
        return Done(first=True, revoked=others)

    def given(self, worker: str) -> tuple[int, ...]:
        """Return what it was given and has not ended."""
        return tuple(self._workers[worker].given)

    # -- where a task comes from

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

    def _steal(self, me: _Worker, revoked: list[tuple[str, int]]) -> int | None:
        """Return the last task of the worker or the place that would end last, if it ends sooner here."""
        ends = np.where(np.array(self._spare) > 0, np.array(self._load) / self._pace, -1.0)
        ends[me.index] = -1.0
        worst = int(ends.argmax())
        last_s = float(ends[worst])
        keeping = (one for one in self._places.values() if one.kept) if self._keepers else ()
        place = max(keeping, key=self._end_of, default=None)
        if place is not None and self._end_of(place) >= last_s:
            last_s, task = self._end_of(place), next(reversed(place.kept))
        elif last_s >= 0:
            place, task = None, next(reversed(self._workers[self._names[worst]].given))
        else:
            return None
        if (self._load[me.index] + self._cost[task]) / self._pace[me.index] >= last_s:
            return None
        self.num_stolen += 1
        if place is None:
            name = self._names[worst]
            self._drop(self._workers[name], task)
            self._running[task].remove(name)
            revoked.append((name, task))
        return task

    def _end_of(self, place: _Place) -> float:
        """When all that is kept there would be done, if nobody else took of it; seconds from now."""
        at = [one.index for one in place.workers]
        return (place.cost + sum(self._load[i] for i in at)) / sum(self._pace[i] for i in at)

    def _twice(self, worker: str, me: _Worker, now: float) -> int | None:
        """Return the task that runs elsewhere and would gain most by being begun here too, if any would."""
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
        if not self._is_any_known:
            self._pace = [pace] * len(self._pace)
            self._is_any_known = True
        share = SHARE if self._known[one.index] else 1.0
        self._pace[one.index] += share * (pace - self._pace[one.index])
        self._known[one.index] = True

    def _drop(self, one: _Worker, task: int) -> None:
        if task in one.given:
            del one.given[task]
            self._load[one.index] -= self._cost[task]
            self._count(one)

    def _count(self, one: _Worker) -> None:
        """How many tasks may be stolen from it: not the one it is at."""
        self._spare[one.index] = max(0, len(one.given) - 1)

    def _free(self, task: int) -> None:
        """Anybody may begin it."""
        self._state[task] = _FREE
        heapq.heappush(self._back, task)

    def _keep_no_more(self, task: int) -> None:
        """Somebody has it now, or has done it."""
        for place in self._keepers.pop(task, ()):
            del place.kept[task]
            place.cost -= self._cost[task]
