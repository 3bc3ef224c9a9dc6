"""Simulates a conversion on a described cluster, with the scheduler of real conversions (`placement`).

A worker fetches input from storage, places the input on the GPU over PCIe, computes, and sends the output back. These
stages run in parallel on different tasks. The storage rate is divided evenly among all workers, even if some are idle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import PlanError
from penstock.types import GB, I64
from penstock_convert.plan.cluster import Cluster, Rates, slowdowns
from penstock_convert.plan.placement import DEVICE_DEPTH, Placement
from penstock_convert.plan.simulate import NUM_BINS, LinkLoad, Prediction, Span, Stage, assumed, bottleneck

STAGES = ("fetch", "place", "compute", "send")
_LAST = len(STAGES) - 1
SILENCE_S = 30.0
"""Seconds of silence after which a worker is considered dead. Source: `config.Settings.stall_s`."""
_DRAWN = frozenset({"GPU 0", "GPU 1"})
_MAX_SPANS = 2000
"""Maximum number of spans in the picture. Only the workers in `_DRAWN` are drawn."""


@dataclass(slots=True, kw_only=True)
class _SimulatedWorker:
    """State of a simulated worker.

    Attributes:
        pace: seconds per byte to fetch, place and compute input, and to send output.
        free: time at which each stage becomes free.
        busy: total busy time of each stage in seconds.
        queue: assigned tasks, with the time at which each task was assigned.
    """

    pace: tuple[float, float, float, float]
    free: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    busy: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    dies: float = np.inf
    ended: float = 0.0


def simulate_convert(
    in_bytes: I64,
    out_bytes: I64,
    cluster: Cluster,
    rates: Rates,
    *,
    seed: int = 0,
    depth: int = DEVICE_DEPTH,
    compute_gb_per_s: float | None = None,
) -> Prediction:
    """Simulate the conversion with one worker for each GPU of the cluster.

    Args:
        in_bytes, out_bytes: input and output bytes of each task. See `tasks.Tasks`.
        cluster: a storage rate of 0 means that storage is not a limit.
        rates: rates of the machine's stages.
        seed: selects the slow workers, the workers that die, and the times of death.
        depth: maximum number of tasks that a worker has at once. See `Placement`.
        compute_gb_per_s: rate in GB/s at which a worker processes input. None means the rate of the transform.

    Raises:
        PlanError: `in_bytes` and `out_bytes` differ in length, or all workers died before the last task finished.
    """
    cluster.check()
    rates.check()
    if len(in_bytes) != len(out_bytes):
        raise PlanError(f"in_bytes has {len(in_bytes)} tasks, but out_bytes has {len(out_bytes)}")
    run = _ConversionEvents(np.asarray(in_bytes), np.asarray(out_bytes), cluster, rates, seed, depth, compute_gb_per_s)
    run.go()
    return run.prediction()


class _ConversionEvents:
    """Events of one simulated conversion."""

    def __init__(
        self,
        in_bytes: I64,
        out_bytes: I64,
        cluster: Cluster,
        rates: Rates,
        seed: int,
        depth: int,
        compute_gb_per_s: float | None,
    ) -> None:
        self.cluster = cluster
        self.compute_gb_per_s = rates.quantise_gb_per_s if compute_gb_per_s is None else compute_gb_per_s
        self.rates = rates
        self.seed = seed
        # Use lists, because reading single numbers from NumPy arrays costs several times as much.
        self.in_bytes = in_bytes.tolist()
        self.out_bytes = out_bytes.tolist()
        self.workers = {
            f"GPU {i}": _SimulatedWorker(pace=pace) for i, pace in enumerate(self._paces(slowdowns(cluster, seed)))
        }
        self.placement = Placement((in_bytes + out_bytes).tolist(), depth=depth)
        self.events: list[tuple[float, int, str, int]] = []
        """Heap of (time, sequence number or -1 if the worker dies, worker, task that it finishes)."""
        self.num_begun = 0
        self.now = 0.0
        self.which: list[int] = []
        self.when: list[float] = []
        """Tasks in the order in which they first finished, with the times."""
        self.ends = np.zeros((3, 0))
        """Rows are the finish time, the bytes in and the bytes out of these tasks."""
        self.spans: list[Span] = []
        self.failed: list[str] = []

    def _paces(self, slow: np.ndarray) -> list[tuple[float, float, float, float]]:
        cluster = self.cluster
        # A worker's storage rate is limited by its shares of the storage, of the node's link and of the host's memory,
        # and by the speed of the worker's process.
        shares = [
            cluster.storage_gb_per_s / cluster.num_gpus,
            cluster.node_storage_gb_per_s / cluster.gpus_per_node,
            self.rates.host_gb_per_s / cluster.gpus_per_node,
            self.rates.worker_gb_per_s,
        ]
        storage_s = max((1 / share / GB for share in shares if share), default=0.0)
        pcie_s, compute_s = 1 / cluster.pcie_gb_per_s / GB, 1 / self.compute_gb_per_s / GB
        return [(storage_s * by, pcie_s * by, compute_s, max(pcie_s, storage_s) * by) for by in slow.tolist()]

    def go(self) -> None:
        self._deaths()
        for name in self.workers:
            self.placement.join(name, 0.0)
        for name in list(self.workers):
            self._feed(name)
        while not self.placement.is_done:
            if not self.events:
                raise PlanError("every worker died before the last task finished")
            self.now, kind, name, task = heapq.heappop(self.events)
            worker = self.workers.get(name)
            # Skip events of a worker that has died.
            if worker is None:
                continue
            if kind < 0:
                self._lost(name)
            # Ignore a task that was revoked. Only the first task of the queue can finish.
            elif self.now <= worker.dies and worker.queue and worker.queue[0][0] == task:
                self._ended(name, worker, task)
        at = np.array(self.which, np.int64)
        self.ends = np.array([self.when, np.array(self.in_bytes)[at], np.array(self.out_bytes)[at]])

    def _deaths(self) -> None:
        """Choose the workers that die, with times of death before the expected end of the conversion."""
        whole_s = sum(self.in_bytes) * max(next(iter(self.workers.values())).pace) / len(self.workers)
        chance = np.random.default_rng((self.seed, 3))
        count = chance.poisson(self.cluster.failures_per_gpu_hour * len(self.workers) * whole_s / 3600)
        for index in chance.permutation(len(self.workers))[:count].tolist():
            name = f"GPU {index}"
            self.workers[name].dies = float(chance.uniform(0.0, whole_s))
            heapq.heappush(self.events, (self.workers[name].dies + SILENCE_S, -1, name, -1))

    def _lost(self, name: str) -> None:
        """Remove a dead worker that has sent no heartbeat for `SILENCE_S`."""
        self.failed.append(f"{name} dies at {self.workers[name].dies:.3f} s, and its tasks run elsewhere")
        self.placement.remove(name)
        del self.workers[name]
        # Assign the freed tasks to workers that were idle.
        for other, worker in list(self.workers.items()):
            if not worker.queue:
                self._feed(other)

    def _feed(self, name: str) -> None:
        """Assign tasks to a worker as the placement decides."""
        worker = self.workers[name]
        # The placement does not know that a worker is dead until `_lost` removes the worker.
        if self.now > worker.dies:
            return
        assignment = self.placement.next(name, self.now)
        self._revoke(assignment.revoked)
        is_idle = not worker.queue
        worker.queue.extend((task, self.now) for task in assignment.tasks)
        if is_idle and worker.queue:
            self._begin(name, worker)

    def _revoke(self, revoked: Iterable[tuple[str, int]]) -> None:
        for name, task in revoked:
            worker = self.workers[name]
            is_first = bool(worker.queue) and worker.queue[0][0] == task
            worker.queue = deque(entry for entry in worker.queue if entry[0] != task)
            # A worker that was running the revoked task begins its next task immediately.
            if is_first and worker.queue:
                self._begin(name, worker)

    def _begin(self, name: str, worker: _SimulatedWorker) -> None:
        """Record when the first task of a worker's queue finishes."""
        task, at = worker.queue[0]
        nbytes, free, busy, is_drawn = self.in_bytes[task], worker.free, worker.busy, name in _DRAWN
        for stage, pace in enumerate(worker.pace):
            if stage == _LAST:
                nbytes = self.out_bytes[task]
            duration_s = pace * nbytes
            # A stage begins when it is free and the previous stage has finished.
            start = free[stage] if free[stage] > at else at
            at = free[stage] = start + duration_s
            busy[stage] += duration_s
            if is_drawn and duration_s and len(self.spans) < _MAX_SPANS:
                self.spans.append(Span(lane=f"{name} {STAGES[stage]}", stage=STAGES[stage], start_s=start, stop_s=at))
        self.num_begun += 1
        # The sequence number orders simultaneous events, so that equal seeds give equal runs.
        heapq.heappush(self.events, (max(at, self.now), self.num_begun, name, task))

    def _ended(self, name: str, worker: _SimulatedWorker, task: int) -> None:
        """Record that the first task of a worker's queue has finished."""
        worker.queue.popleft()
        worker.ended = self.now
        done = self.placement.done(name, task, self.now)
        self._revoke(done.revoked)
        if done.first:
            self.which.append(task)
            self.when.append(self.now)
        if worker.queue:
            self._begin(name, worker)
        self._feed(name)

    def prediction(self) -> Prediction:
        """Return the result. Call `go` first."""
        cluster, count, total_s = self.cluster, len(self.workers), self.now
        names = list(self.workers)
        busy = np.array([each.busy for each in self.workers.values()])
        most = busy.argmax(axis=0)
        stages = tuple(
            Stage(
                name=stage,
                member=names[most[i]],
                busy_s=float(busy[most[i], i]),
                detail=f"mean {busy[:, i].mean():.3f}",
            )
            for i, stage in enumerate(STAGES)
        )
        ended = np.array([each.ended for each in self.workers.values()])
        # Compute the shortest possible duration, for workers without stragglers.
        nominal = self._paces(np.ones(cluster.num_gpus))[0]
        in_bytes, out_bytes = self.ends[1].sum(), self.ends[2].sum()
        sums = (in_bytes * nominal[0], in_bytes * nominal[1], out_bytes * nominal[3])
        placement = self.placement
        return Prediction(
            kind="convert",
            what=f"{len(self.in_bytes)} tasks, {cluster.num_gpus} workers; {placement.num_stolen} reassigned, "
            f"{placement.num_twice} duplicated",
            predicted_s=total_s,
            limit_s=float(max(sums)) / cluster.num_gpus,
            bottleneck=bottleneck(stages, (), total_s, "waiting for tasks"),
            moved_bytes=int(in_bytes + out_bytes),
            num_receivers=count,
            first_s=float(ended.min()),
            median_s=float(np.median(ended)),
            stages=stages,
            links=tuple(
                self._load(name, row, stage)
                for name, row, stage in (("fetched", 1, 0), ("placed", 1, 1), ("sent", 2, 3))
                if total_s and nominal[stage]
            ),
            timeline=tuple(self.spans),
            failed=tuple(self.failed),
            assumed=assumed(self.rates, ("quantise_gb_per_s",)),
        )

    def _load(self, name: str, row: int, stage: int) -> LinkLoad:
        """Return the bytes of one stage, and the used fraction of its capacity over time."""
        workers = list(self.workers.values())
        rates = [1 / each.pace[stage] if each.pace[stage] else np.inf for each in workers]
        carried = np.histogram(self.ends[0], NUM_BINS, (0.0, self.now), weights=self.ends[row])[0]
        # A value above 1 is possible, because all bytes of a task count in the bin in which the task finished.
        load = np.minimum(carried / (sum(rates) * self.now / NUM_BINS), 1.0)
        busiest = max(range(len(workers)), key=lambda i: workers[i].busy[stage])
        busy_s = workers[busiest].busy[stage]
        return LinkLoad(
            name=name,
            most_bytes=round(busy_s * rates[busiest]) if busy_s else 0,
            total_bytes=int(self.ends[row].sum()),
            num_used=len(workers),
            busiest_s=busy_s,
            load=tuple(np.round(load, 4).tolist()),
        )
