"""Scheduler of a conversion. Tasks are assigned by expected finish times, and reassigned or duplicated near the end.

A worker that requests tasks receives the first available task in this list:

1. a task whose input is in the worker's cache
2. the next free task of the job
3. the last queued task of the worker or cache that would finish last
4. a duplicate of a task that runs on another worker

The caller passes the time, so equal events lead to equal decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from penstock.errors import PlanError

DEPTH = 4
"""Number of tasks that a worker has at once: one being read, one copied, one computed and one written."""
DEVICE_DEPTH = 12
"""Number of tasks that a worker with a device has at once. It is higher, because copies and kernels continue while
threads do other work. Source: benchmarks/results/h200x2_202611/convert.md."""
GUESS_BYTES_PER_S = 1e9
"""Assumed pace of a worker until a task of any worker has finished. Only ratios matter."""
PACE_WEIGHT = 0.3
"""Weight of the newest task in a worker's pace. A change of pace is detected after about three tasks."""
NUM_RUNS = 2
"""Maximum number of workers that run the same task at once."""

_FREE, _RESERVED, _ASSIGNED, _DONE = range(4)


def depth_of(devices: Iterable[str]) -> int:
    """Return the maximum number of tasks that a worker on these devices has at once."""
    return DEPTH if all(device == "cpu" for device in devices) else DEVICE_DEPTH


@dataclass(slots=True, kw_only=True)
class _SharedCache:
    """A cache that workers share, for example on one host, with the tasks whose input is in the cache."""

    tasks: dict[int, None] = field(default_factory=dict)
    """Tasks that are reserved for this place and not assigned yet, in order. Workers elsewhere may steal them."""
    cost: int = 0
    """Total size of these tasks in bytes."""
    workers: list[_ScheduledWorker] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _ScheduledWorker:
    """Record of one worker. Lists in `Placement` contain further values of the worker, at `index`."""

    index: int
    tasks: dict[int, None] = field(default_factory=dict)
    """Assigned tasks that have not finished, in order."""
    place: _SharedCache
    last: float
    """Time at which the worker last finished a task, or received a task while it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAssignment:
    """Tasks assigned to one worker."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[tuple[str, int], ...] = ()
    """Pairs of a worker from which a task was taken and the task. The worker need not begin the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedTask:
    """Consequences of a finished task."""

    first: bool
    """Whether the result counts, because no other worker finished the task earlier."""
    revoked: tuple[tuple[str, int], ...] = ()
    """Pairs of another worker that has the task and the task. The worker need not begin the task."""


class Placement:
    """Scheduler of one job, which records the assigned tasks and the pace of each worker.

    A task is free, reserved for the workers that share a cache, assigned to one or two workers, or done. The pace of a
    worker is measured when the worker finishes tasks. Every decision compares expected finish times.

    Args:
        cost: bytes of each task, in the order in which tasks begin.
        depth: maximum number of tasks that a worker has at once.
        done: tasks that earlier runs of a resumed job have finished.

    Attributes:
        num_left: number of tasks that have not finished.
        num_stolen: number of tasks that were reassigned to a different worker.
        num_twice: number of tasks that were assigned to a second worker.
    """

    def __init__(self, cost: Sequence[int], *, depth: int = DEPTH, done: Iterable[int] = ()) -> None:
        # Use at least 1, because a task without bytes would yield a pace of 0, by which loads are divided.
        self._cost = [max(1, int(c)) for c in cost]
        self._depth = depth
        self._state = bytearray(len(self._cost))
        self._workers: dict[str, _ScheduledWorker] = {}
        self._places: dict[str, _SharedCache] = {}
        self._reservations: dict[int, list[_SharedCache]] = {}
        """Places for which each reserved task is reserved."""
        # These lists are indexed by `_ScheduledWorker.index` and include lost workers, so that `_steal` can use NumPy.
        self._names: list[str] = []
        self._load: list[int] = []
        """Bytes of the worker's unfinished tasks."""
        self._pace: list[float] = []
        """Bytes per second, measured or assumed."""
        self._spare: list[int] = []
        """Tasks that may be stolen from the worker: all except the running one."""
        self._is_measured: list[bool] = []
        """Whether the worker's pace has been measured."""
        self._is_any_measured = False
        self._running: dict[int, list[str]] = {}
        """For each assigned task, the workers that have it."""
        self._next = 0
        """Tasks below this number are not free unless they are in `_freed`."""
        self._freed: list[int] = []
        """Heap of tasks that became free again."""
        self.num_left = len(self._cost)
        self.num_stolen = 0
        self.num_twice = 0
        for task in set(done):
            self._state[task] = _DONE
            self.num_left -= 1

    @property
    def is_done(self) -> bool:
        """Return whether every task has finished."""
        return self.num_left == 0

    def join(self, worker: str, now: float, *, holds: Iterable[int] = (), at: str = "") -> None:
        """Add a worker.

        Args:
            holds: tasks with inputs in the worker's cache. Other workers receive these tasks only after all free tasks.
            at: identity of the cache. Empty means that no other worker uses the cache.

        Raises:
            PlanError: a worker with this name has already joined.
        """
        if worker in self._workers:
            raise PlanError(f"worker {worker!r} joined twice")
        present = [self._pace[other.index] for other in self._workers.values()]
        place = self._places.setdefault(at or f"worker {worker}", _SharedCache())
        new = self._workers[worker] = _ScheduledWorker(index=len(self._names), place=place, last=now)
        place.workers.append(new)
        self._names.append(worker)
        self._load.append(0)
        self._spare.append(0)
        self._is_measured.append(False)
        # Use the median, so that one hanging worker does not make a new worker look slow.
        self._pace.append(median(present) if present else GUESS_BYTES_PER_S)
        # Reserve the task for every cache that contains its input. The first available worker receives the task.
        for task in holds:
            if self._state[task] in {_FREE, _RESERVED} and task not in place.tasks:
                self._state[task] = _RESERVED
                self._reservations.setdefault(task, []).append(place)
                place.tasks[task] = None
                place.cost += self._cost[task]

    def remove(self, worker: str) -> None:
        """Remove a worker that died or is considered dead, and free its tasks."""
        removed = self._workers.pop(worker, None)
        if removed is None:
            return
        self._load[removed.index] = self._spare[removed.index] = 0
        for task in removed.tasks:
            runs = self._running.get(task, [])
            if worker in runs:
                runs.remove(worker)
            # Do not free a task that also runs on another worker, because it would run a third time.
            if not runs and self._state[task] == _ASSIGNED:
                self._running.pop(task, None)
                self._free(task)
        removed.place.workers.remove(removed)
        # When the last worker of a cache is lost, release the reservations for the cache.
        if not removed.place.workers:
            for task in list(removed.place.tasks):
                self._reservations[task].remove(removed.place)
                if not self._reservations[task]:
                    del self._reservations[task]
                    self._free(task)
            removed.place.tasks.clear()
            removed.place.cost = 0

    def next(self, worker: str, now: float) -> TaskAssignment:
        """Assign tasks to a worker, and return them. The result may be empty."""
        me = self._workers[worker]
        tasks: list[int] = []
        revoked: list[tuple[str, int]] = []
        while len(me.tasks) < self._depth:
            # Prefer tasks whose input is in the worker's cache, because these tasks do not read from storage.
            task = next(iter(me.place.tasks), None)
            if task is None:
                task = self._take_common()
            if task is None:
                task = self._steal(me, revoked)
            # Duplicate a task only for an idle worker, because a second run uses bandwidth that other workers may need.
            if task is None and not me.tasks:
                task = self._duplicate(worker, me, now)
            if task is None:
                break
            if not me.tasks:
                me.last = now
            me.tasks[task] = None
            self._load[me.index] += self._cost[task]
            self._unreserve(task)
            self._state[task] = _ASSIGNED
            self._running.setdefault(task, []).append(worker)
            tasks.append(task)
        self._count_spare(me)
        return TaskAssignment(tasks=tuple(tasks), revoked=tuple(revoked))

    def done(self, worker: str, task: int, now: float) -> CompletedTask:
        """Record that a worker finished a task. The worker may already have been removed."""
        me = self._workers.get(worker)
        if me is not None and task in me.tasks:
            # Measure the time since the worker last finished a task, because assigned tasks wait in a queue.
            self._update_pace(me, self._cost[task] / max(now - me.last, 1e-9))
            me.last = now
            self._drop(me, task)
        # Another worker finished the task first, or a worker that was considered dead is still alive.
        if self._state[task] == _DONE:
            return CompletedTask(first=False)
        self._unreserve(task)
        self._state[task] = _DONE
        self.num_left -= 1
        others = tuple((name, task) for name in self._running.pop(task, []) if name != worker)
        for name, _ in others:
            self._drop(self._workers[name], task)
        return CompletedTask(first=True, revoked=others)

    def assigned(self, worker: str) -> tuple[int, ...]:
        """Return the unfinished tasks of a worker."""
        return tuple(self._workers[worker].tasks)

    def progress(self, worker: str, now: float) -> tuple[int, float, float]:
        """Return a worker's current task or -1, the seconds since it last finished a task, and the expected seconds.

        The expected time covers all tasks of the worker at the median pace, because overlapping tasks may finish at the
        same time. A worker is late if it takes longer than the expected time.
        """
        me = self._workers[worker]
        task = next(iter(me.tasks), -1)
        if task < 0:
            return task, 0.0, 0.0
        pace = median(self._pace[other.index] for other in self._workers.values())
        return task, now - me.last, self._load[me.index] / pace

    def _take_common(self) -> int | None:
        # Take freed tasks first, because they are earlier in the job's order, which begins with the longest tasks.
        while self._freed:
            task = heapq.heappop(self._freed)
            if self._state[task] == _FREE:
                return task
        while self._next < len(self._cost):
            task, self._next = self._next, self._next + 1
            if self._state[task] == _FREE:
                return task
        return None

    def _steal(self, me: _ScheduledWorker, revoked: list[tuple[str, int]]) -> int | None:
        """Return the last task of the worker or cache that would finish last, if `me` would finish the task sooner."""
        # Use NumPy, because this runs for every request at the end of a job, with up to 1,000 workers. `me` and workers
        # without spare tasks get -1, which is below every time.
        ends = np.where(np.array(self._spare) > 0, np.array(self._load) / self._pace, -1.0)
        ends[me.index] = -1.0
        worst = int(ends.argmax())
        last_s = float(ends[worst])
        reserving = (each for each in self._places.values() if each.tasks) if self._reservations else ()
        place = max(reserving, key=self._end_of, default=None)
        if place is not None and self._end_of(place) >= last_s:
            last_s, task = self._end_of(place), next(reversed(place.tasks))
        elif last_s >= 0:
            place, task = None, next(reversed(self._workers[self._names[worst]].tasks))
        else:
            return None
        # Do not move a task that `me` would not finish sooner. Otherwise tasks would move back and forth.
        if (self._load[me.index] + self._cost[task]) / self._pace[me.index] >= last_s:
            return None
        self.num_stolen += 1
        if place is None:
            name = self._names[worst]
            self._drop(self._workers[name], task)
            self._running[task].remove(name)
            revoked.append((name, task))
        return task

    def _end_of(self, place: _SharedCache) -> float:
        """Return the seconds that the workers of a cache need for their assigned and reserved tasks."""
        at = [worker.index for worker in place.workers]
        return (place.cost + sum(self._load[i] for i in at)) / sum(self._pace[i] for i in at)

    def _duplicate(self, worker: str, me: _ScheduledWorker, now: float) -> int | None:
        """Return the running task for which a second run on `worker` would save the most time, or None."""
        best, best_s = None, 0.0
        for name, other in self._workers.items():
            task = next(iter(other.tasks), None)
            if name == worker or task is None:
                continue
            runs = self._running[task]
            # Never run a task a third time. If two workers are slow, the task itself is slow.
            if len(runs) >= NUM_RUNS or worker in runs:
                continue
            here_s, passed_s = self._cost[task] / self._pace[me.index], now - other.last
            # Assume that a late task requires as much time again as it has already taken.
            gain_s = max(self._cost[task] / self._pace[other.index] - passed_s, passed_s) - here_s
            if gain_s > best_s:
                best, best_s = task, gain_s
        self.num_twice += best is not None
        return best

    def _update_pace(self, worker: _ScheduledWorker, pace: float) -> None:
        """Update a worker's pace. The first measured pace replaces the assumed pace of all workers."""
        if not self._is_any_measured:
            self._pace = [pace] * len(self._pace)
            self._is_any_measured = True
        weight = PACE_WEIGHT if self._is_measured[worker.index] else 1.0
        self._pace[worker.index] += weight * (pace - self._pace[worker.index])
        self._is_measured[worker.index] = True

    def _drop(self, worker: _ScheduledWorker, task: int) -> None:
        if task in worker.tasks:
            del worker.tasks[task]
            self._load[worker.index] -= self._cost[task]
            self._count_spare(worker)

    def _count_spare(self, worker: _ScheduledWorker) -> None:
        self._spare[worker.index] = max(0, len(worker.tasks) - 1)

    def _free(self, task: int) -> None:
        self._state[task] = _FREE
        # The heap keeps the job's order, which begins with the longest tasks.
        heapq.heappush(self._freed, task)

    def _unreserve(self, task: int) -> None:
        for place in self._reservations.pop(task, ()):
            del place.tasks[task]
            place.cost -= self._cost[task]
