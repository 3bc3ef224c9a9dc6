"""Scheduler of a conversion: assigns tasks by expected finish, reassigns waiting ones, runs the last ones twice.

In: tasks' costs, what workers hold, and events (joined, done, lost) with the caller's clock. Out: assignments.
Not here: processes and messages (`jobs`), what a task is (`tasks`). No clock of its own; deterministic.

    next(worker): tasks whose bytes are near it -> the common queue -> the last task of the slowest worker ->
                  a task that runs elsewhere, a second time
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
    """Return the number of tasks that a worker on these devices is given ahead."""
    return DEPTH if all(device == "cpu" for device in devices) else DEVICE_DEPTH


@dataclass(slots=True, kw_only=True)
class _Place:
    """A cache that workers share, as those of one host do, and the tasks whose input is in it."""

    tasks: dict[int, None] = field(default_factory=dict)
    """Reserved for this place, in order, and in no worker's queue yet; others may steal them."""
    cost: int = 0
    """Bytes of all these tasks."""
    workers: list[_Worker] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """The scheduler's record of one worker; values compared over all workers lie in lists, at `index`."""

    index: int
    tasks: dict[int, None] = field(default_factory=dict)
    """Tasks it was given and has not ended, in order."""
    place: _Place
    last: float
    """Time at which it last ended a task, or got its first one after it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The tasks for one worker to run."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[tuple[str, int], ...] = ()
    """Workers these were taken from: they need not begin them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedTask:
    """The consequences of a task's end."""

    first: bool
    """True if its result counts: no other worker ended the task before."""
    revoked: tuple[tuple[str, int], ...] = ()
    """Workers that have it too and need not begin it."""


class Placement:
    """The scheduler of one job: which worker has which task, and how fast each is.

    A task is free (any worker may begin it), kept (reserved for the workers of a place), given (to one or two workers)
    or done. A worker's pace is measured from the ends of its tasks, and every decision compares expected ends.

    Args:
        cost: of each task, bytes; tasks are begun in this order.
        depth: tasks a worker is given ahead.
        done: tasks that need not run: of a job that is resumed.

    Attributes:
        num_left: tasks that have not ended.
        num_stolen, num_twice: tasks taken from where they were queued or kept; tasks begun a second time.
    """

    def __init__(self, cost: Sequence[int], *, depth: int = DEPTH, done: Iterable[int] = ()) -> None:
        # At least 1: a task of no bytes would measure a pace of 0, and loads are divided by paces.
        self._cost = [max(1, int(c)) for c in cost]
        self._depth = depth
        self._state = bytearray(len(self._cost))
        self._workers: dict[str, _Worker] = {}
        self._places: dict[str, _Place] = {}
        self._keepers: dict[int, list[_Place]] = {}
        """By task that is kept: the places that it is reserved for."""
        # By `_Worker.index`, of lost workers too: `_steal` compares all workers at once, in numpy.
        self._names: list[str] = []
        self._load: list[int] = []
        """Bytes of the tasks that it was given and has not ended."""
        self._pace: list[float] = []
        """Bytes per second, measured or guessed."""
        self._spare: list[int] = []
        """Tasks that may be stolen from it: all but the one it is running."""
        self._known: list[bool] = []
        """True once its pace was measured."""
        self._is_any_known = False
        self._running: dict[int, list[str]] = {}
        """By task that is given: the workers that have it."""
        self._next = 0
        """Tasks below this number are not free, unless they are in `_back`."""
        self._back: list[int] = []
        """Heap of tasks that became free again."""
        self.num_left = len(self._cost)
        self.num_stolen = 0
        self.num_twice = 0
        for task in set(done):
            self._state[task] = _DONE
            self.num_left -= 1

    @property
    def is_done(self) -> bool:
        """Return whether every task has ended."""
        return self.num_left == 0

    def join(self, worker: str, now: float, *, holds: Iterable[int] = (), at: str = "") -> None:
        """Add a worker.

        Args:
            holds: tasks whose inputs are near it, reserved for the workers of that place while others have work.
            at: the name of that place; empty: the worker is alone there.

        Raises:
            PlanError: a worker of this name has joined already.
        """
        if worker in self._workers:
            raise PlanError(f"worker {worker!r} joined twice")
        present = [self._pace[other.index] for other in self._workers.values()]
        place = self._places.setdefault(at or f"worker {worker}", _Place())
        new = self._workers[worker] = _Worker(index=len(self._names), place=place, last=now)
        place.workers.append(new)
        self._names.append(worker)
        self._load.append(0)
        self._spare.append(0)
        self._known.append(False)
        # The median and not the mean: one worker that hangs must not make a new one look slow.
        self._pace.append(median(present) if present else GUESS_BYTES_PER_S)
        # Several hosts may hold one task: it is reserved for all of them, and goes to the first that has room.
        for task in holds:
            if self._state[task] in {_FREE, _KEPT} and task not in place.tasks:
                self._state[task] = _KEPT
                self._keepers.setdefault(task, []).append(place)
                place.tasks[task] = None
                place.cost += self._cost[task]

    def lost(self, worker: str) -> None:
        """Remove a worker that died or is taken for dead, and free its tasks for others."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        self._load[gone.index] = self._spare[gone.index] = 0
        for task in gone.tasks:
            runs = self._running.get(task, [])
            if worker in runs:
                runs.remove(worker)
            # It may be running a second time elsewhere: then it is not freed, or it would run a third time.
            if not runs and self._state[task] == _GIVEN:
                self._running.pop(task, None)
                self._free(task)
        gone.place.workers.remove(gone)
        # The last of its host: nobody is near those bytes any more.
        if not gone.place.workers:
            for task in list(gone.place.tasks):
                self._keepers[task].remove(gone.place)
                if not self._keepers[task]:
                    del self._keepers[task]
                    self._free(task)
            gone.place.tasks.clear()
            gone.place.cost = 0

    def next(self, worker: str, now: float) -> Given:
        """Return the tasks for a worker to begin or to queue now; none: it has enough, or nothing is left for it."""
        me = self._workers[worker]
        tasks: list[int] = []
        revoked: list[tuple[str, int]] = []
        while len(me.tasks) < self._depth:
            # Near bytes first: what is cached on this host costs it no storage.
            task = next(iter(me.place.tasks), None)
            if task is None:
                task = self._take_common()
            if task is None:
                task = self._steal(me, revoked)
            # Only for a worker that has nothing else to do: a second run costs bytes and time that others may need.
            if task is None and not me.tasks:
                task = self._twice(worker, me, now)
            if task is None:
                break
            if not me.tasks:
                me.last = now
            me.tasks[task] = None
            self._load[me.index] += self._cost[task]
            self._keep_no_more(task)
            self._state[task] = _GIVEN
            self._running.setdefault(task, []).append(worker)
            tasks.append(task)
        self._count(me)
        return Given(tasks=tuple(tasks), revoked=tuple(revoked))

    def done(self, worker: str, task: int, now: float) -> CompletedTask:
        """Record that a worker ended a task. A worker that was lost may still report one; a task counts once."""
        me = self._workers.get(worker)
        if me is not None and task in me.tasks:
            # From its last end and not from when the task was given: tasks queue on a worker, and stages overlap.
            self._measured(me, self._cost[task] / max(now - me.last, 1e-9))
            me.last = now
            self._drop(me, task)
        # The other one of two runs was first, or a worker that was taken for dead was not.
        if self._state[task] == _DONE:
            return CompletedTask(first=False)
        self._keep_no_more(task)
        self._state[task] = _DONE
        self.num_left -= 1
        others = tuple((name, task) for name in self._running.pop(task, []) if name != worker)
        for name, _ in others:
            self._drop(self._workers[name], task)
        return CompletedTask(first=True, revoked=others)

    def given(self, worker: str) -> tuple[int, ...]:
        """Return the tasks that a worker was given and has not ended."""
        return tuple(self._workers[worker].tasks)

    def standing(self, worker: str, now: float) -> tuple[int, float, float]:
        """Return how far a worker is: its task (-1: none), seconds since it last ended one, and seconds expected.

        Expected is what all of its tasks take at the median pace of the workers: their stages overlap, so they may end
        together, and only a worker that ends none for longer stands out.
        """
        me = self._workers[worker]
        task = next(iter(me.tasks), -1)
        if task < 0:
            return task, 0.0, 0.0
        pace = median(self._pace[other.index] for other in self._workers.values())
        return task, now - me.last, self._load[me.index] / pace

    # -- where a task comes from

    def _take_common(self) -> int | None:
        """Return the next free task in the order of the job; None: none is free."""
        # Tasks that became free again first: they come earlier in the job's order, in which the longest are first.
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
        # In numpy: with 1,000 workers this runs for every task that is asked for at the end of a job.
        # -1 for workers without a task to spare, and for this one: it ends before everybody.
        ends = np.where(np.array(self._spare) > 0, np.array(self._load) / self._pace, -1.0)
        ends[me.index] = -1.0
        worst = int(ends.argmax())
        last_s = float(ends[worst])
        reserving = (each for each in self._places.values() if each.tasks) if self._keepers else ()
        place = max(reserving, key=self._end_of, default=None)
        if place is not None and self._end_of(place) >= last_s:
            last_s, task = self._end_of(place), next(reversed(place.tasks))
        elif last_s >= 0:
            place, task = None, next(reversed(self._workers[self._names[worst]].tasks))
        else:
            return None
        # Only if it ends sooner here: else the last tasks would go to and fro between workers.
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
        """Return in how many seconds all tasks reserved for a place would be done, if no other worker took any."""
        at = [worker.index for worker in place.workers]
        return (place.cost + sum(self._load[i] for i in at)) / sum(self._pace[i] for i in at)

    def _twice(self, worker: str, me: _Worker, now: float) -> int | None:
        """Return the task that runs elsewhere and would gain most by being begun here too, if any would."""
        best, best_s = None, 0.0
        for name, other in self._workers.items():
            task = next(iter(other.tasks), None)
            if name == worker or task is None:
                continue
            runs = self._running[task]
            # Never a third time: two that are both slow show that the task is, and not the worker.
            if len(runs) >= NUM_RUNS or worker in runs:
                continue
            here_s, passed_s = self._cost[task] / self._pace[me.index], now - other.last
            # What took longer than its worker's pace says takes as long again.
            gain_s = max(self._cost[task] / self._pace[other.index] - passed_s, passed_s) - here_s
            if gain_s > best_s:
                best, best_s = task, gain_s
        self.num_twice += best is not None
        return best

    def _measured(self, worker: _Worker, pace: float) -> None:
        """Take over a worker's newest pace; the first of all is also the guess for workers without one."""
        # The first pace of all replaces the guess for everybody: the guess may be wrong by orders of magnitude.
        if not self._is_any_known:
            self._pace = [pace] * len(self._pace)
            self._is_any_known = True
        share = SHARE if self._known[worker.index] else 1.0
        self._pace[worker.index] += share * (pace - self._pace[worker.index])
        self._known[worker.index] = True

    def _drop(self, worker: _Worker, task: int) -> None:
        """Take a task from a worker, if it has it."""
        if task in worker.tasks:
            del worker.tasks[task]
            self._load[worker.index] -= self._cost[task]
            self._count(worker)

    def _count(self, worker: _Worker) -> None:
        """Count the tasks that may be stolen from a worker: all but the one it is running."""
        self._spare[worker.index] = max(0, len(worker.tasks) - 1)

    def _free(self, task: int) -> None:
        """Let any worker begin a task."""
        self._state[task] = _FREE
        # A heap, so that freed tasks come back in the order of the job: the longest were to run first.
        heapq.heappush(self._back, task)

    def _keep_no_more(self, task: int) -> None:
        """Take a task from the places it is reserved for: it was given to a worker, or is done."""
        for place in self._keepers.pop(task, ()):
            del place.tasks[task]
            place.cost -= self._cost[task]
