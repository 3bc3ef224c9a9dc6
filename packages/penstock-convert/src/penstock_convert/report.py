"""The report of a conversion: bytes read and verified, measured and predicted seconds, and statistics of each worker.

`plan.simulate_convert` predicts the duration, with rates that `penstock calibrate` measures.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.engine.trace import STAGES, Span
from penstock.report import TransferStats, bytes_text
from penstock.storage import is_remote
from penstock.storage.weight_set import WeightSet
from penstock.types import GB
from penstock_convert.job import ConversionJob
from penstock_convert.operations.operation import Chain, Operation
from penstock_convert.plan.placement import depth_of

if TYPE_CHECKING:
    from penstock_convert.plan.cluster import Cluster, Rates


_SHOWN = 5
"""Maximum number of files to name for each reason why files were omitted."""


@dataclass(slots=True)
class WorkerStats:
    """Statistics of one worker, which the coordinator updates while the worker runs."""

    worker: str
    device: str
    num_tasks: int = 0
    moved_bytes: int = 0
    fetched_bytes: int = 0
    """Bytes read from the sources, as last reported. A cache reads whole chunks and headers too."""
    asked_bytes: int = 0
    """Bytes read from the sources or from a cache."""
    busy_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    end: str = "finished"
    """How the worker ended: `finished`, or the reason why it was lost."""

    def note_read(self, fetched_bytes: int, asked_bytes: int) -> None:
        """Record the number of bytes that the worker has read so far. Ignore outdated counts."""
        # Two threads send counts, with beats and with finished tasks, so an outdated count may arrive last.
        self.fetched_bytes = max(self.fetched_bytes, fetched_bytes)
        self.asked_bytes = max(self.asked_bytes, asked_bytes)


@dataclass(slots=True)
class WorkerTrace:
    """The spans of one worker, measured with its own clock."""

    row: str
    spans: list[Span] = field(default_factory=list)
    behind_s: float = math.inf
    """Seconds to add to the worker's clock to get this process's clock."""


def rows_of(traces: Sequence[WorkerTrace], executors: Sequence[str]) -> dict[str, list[Span]]:
    """Return all spans in this process's time, in rows for each worker's stages and executors."""
    rows: dict[str, list[Span]] = {f"{trace.row} {name}": [] for trace in traces for name in (STAGES, *executors)}
    # The offset is infinite for a worker whose clock was never compared, but that worker has no spans.
    for trace in traces:
        for name, what, thread, start, stop, nbytes in trace.spans:
            rows[f"{trace.row} {name}"].append(
                (name, what, thread, start + trace.behind_s, stop + trace.behind_s, nbytes)
            )
    return rows


class ConvertReport(TransferStats, frozen=True, kw_only=True):
    """The measurements of one conversion.

    `verified_bytes` is the part of `read_bytes` that was compared with the digests in the sources' manifests. The
    phases are `start` until the first worker was ready, `move` until the last task ended, and `end`.
    """

    uri: str
    """URI of the destination."""
    operation: str
    num_tensors: int
    read_bytes: int
    """Bytes that the tasks of this run read, as planned. Verified reads extend to the ends of leaves."""
    fetched_bytes: int
    """Bytes that this process and its workers read from the sources. A cache reads whole chunks and headers too."""
    held_bytes: int
    """Bytes read from the caches on the workers' hosts."""
    num_tasks: int
    num_resumed: int
    """Number of tasks that earlier runs had finished."""
    num_stolen: int
    """Number of tasks that were reassigned from the worker for which they waited to a different worker."""
    num_twice: int
    """Number of tasks that were started a second time, on a different worker."""
    num_workers: int
    """Number of workers that ran at the same time."""
    predicted_s: float | None
    """Predicted duration of the phase `move`. None if there is no prediction."""
    predicted_by: str
    """The basis of the prediction, or why there is none."""
    busy_s: Mapping[str, float]
    """Busy seconds for each executor, summed over workers and their threads."""
    workers: tuple[WorkerStats, ...]
    """Every worker that was started, including replaced ones."""
    peak_bytes: int
    """Peak host memory in bytes that the tasks of any single worker used."""
    verified: bool
    """Whether all bytes read from the sources, in this run and earlier runs, were compared with digests."""
    left_out: tuple[str, ...]
    """Files and folders in the first source's directory that the result lacks, and omitted weights in other sources."""
    why: str
    """How the sources were verified, or why not. The result's own digests are always those of the computed bytes."""
    why_left_out: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The reason for each entry in `left_out`."""

    def summary(self) -> str:
        """Return a short description of the conversion."""
        done = f"{self.num_tasks} tasks by {self.num_workers} workers"
        resumed = f", {self.num_resumed} by an earlier run" if self.num_resumed else ""
        lines = [
            f"{self.uri}: {self.operation}: {self.num_tensors} tensors, {bytes_text(self.nbytes)}, from "
            f"{bytes_text(self.read_bytes)} read in {self.wall_s:.3f} s ({self.gb_per_s:.2f} GB/s); {done}{resumed}",
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}",
        ]
        return "\n".join(lines + [f"left out: {text}" for text in self.left_out_by_reason()])

    def left_out_by_reason(self) -> list[str]:
        """Return a line for each reason why files were omitted, with the names of the first files."""
        groups: dict[str, list[str]] = {}
        for path in self.left_out:
            groups.setdefault(self.why_left_out.get(path, "not read"), []).append(path)
        return [
            f"{', '.join(paths[:_SHOWN])}{f' and {len(paths) - _SHOWN} more' if len(paths) > _SHOWN else ''}: {why}"
            for why, paths in groups.items()
        ]

    @property
    def gb_per_s(self) -> float:
        """Return gigabytes read per second."""
        return self.read_bytes / GB / self.wall_s if self.wall_s else 0.0

    @property
    def off_by(self) -> float | None:
        """Return the relative difference from the prediction, such as 0.1 for 10 % longer, or None."""
        moving_s = self.phases["move"]
        return moving_s / self.predicted_s - 1.0 if self.predicted_s and moving_s else None

    @property
    def utilisation(self) -> dict[str, float]:
        """Return the mean number of busy threads in each executor, per worker."""
        return {name: busy_s / (self.wall_s * max(1, self.num_workers)) for name, busy_s in self.busy_s.items()}


def how_verified(sources: Sequence[WeightSet], *, verify: bool) -> str:
    """Return `ConvertReport.why`: how the sources were verified, or why not all sources were verified."""
    bare = [weights.why_unverified for weights in sources if weights.why_unverified is not None]
    if not verify:
        return "verify=False"
    if bare:
        return f"{len(bare)} of {len(sources)} sources have no digests: {bare[0]}"
    return "leaf digests compared where they were read"


_MODELS = {"H200": "h200", "H100": "h100"}
"""Maps a part of a GPU's name to the cluster description with that GPU."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""Directory that contains a directory for each GPU. Source: README of NVIDIA's Linux driver, "The /proc Interface"."""


Predicted = tuple[float | None, str]
"""Seconds from the first worker's readiness to the last task's end, with the basis of the prediction. Or None and the
reason."""


def predict(
    job: ConversionJob, kept: Set[int], uris: Iterable[str], devices: Sequence[str], rates: Rates | None
) -> Predicted:
    """Predict the duration of a run.

    Args:
        job: the planned job.
        kept: tasks that earlier runs finished.
        uris: URIs of all source files and of the destination.
        devices: the device of each worker on this host. Empty if the workers are on other hosts.
        rates: rates of this machine's stages. None means the known rates of this machine's GPU model.
    """
    rows = np.array([task for task in range(len(job.tasks)) if task not in kept], np.int64)
    if not len(rows):
        return None, "nothing was left to do"
    # Do not guess an object store's rate, which depends on the network and on other users.
    if away := next((uri for uri in uris if is_remote(uri)), None):
        return None, f"no rate is known for {away}"
    machine = _machine(devices, rates) if devices else "no rates are known for other hosts"
    if isinstance(machine, str):
        return None, machine
    cluster, known = machine
    # Import the simulation only now, because most runs have no measured rates and need no simulation.
    from penstock_convert.plan.simulate_convert import simulate_convert

    # Use the same queue depth as the coordinator, because the depth determines how well stages overlap.
    read_bytes, depth = job.read_bytes[rows].sum(axis=1), depth_of(devices)
    simulated = simulate_convert(
        read_bytes,
        job.tasks.out_bytes[rows],
        cluster,
        known,
        depth=depth,
        compute_gb_per_s=compute_gb_per_s(job.operation, known),
    )
    return simulated.predicted_s, f"the rates of {known.name}, assuming that the disk keeps up"


def compute_gb_per_s(operation: Operation, rates: Rates) -> float:
    """Return the rate in GB/s at which an operation, or a chain of steps, processes its input."""
    if isinstance(operation, Chain):
        return 1 / sum(1 / compute_gb_per_s(step, rates) for step in operation.steps)
    beginnings = [name for name in rates.operation_gb_per_s if operation.name.startswith(name)]
    # The longest matching name is the most specific, such as `to fp8-block128` compared with `to`.
    return rates.operation_gb_per_s[max(beginnings, key=len)] if beginnings else rates.quantise_gb_per_s


def _machine(devices: Sequence[str], rates: Rates | None) -> tuple[Cluster, Rates] | str:
    """Return this host as a cluster with one GPU per worker and its rates, or the reason why no rates are known."""
    is_on_cpu = all(device == "cpu" for device in devices)
    if is_on_cpu and rates is None:
        return "no rates are known for this processor: measure it with `penstock calibrate FILE`"
    from penstock_convert.plan.cluster import CLUSTERS

    count = len(devices)
    if is_on_cpu and rates is not None:
        # Bytes are copied from and to the page cache. Workers share the cores if there are more workers than cores.
        share = min(1.0, len(os.sched_getaffinity(0)) / count)
        alone = msgspec.structs.replace(
            rates,
            quantise_gb_per_s=rates.quantise_gb_per_s * share,
            operation_gb_per_s={name: rate * share for name, rate in rates.operation_gb_per_s.items()},
        )
        return _host(CLUSTERS["cpu-pair"][0], count, rates.device_copy_gb_per_s * share), alone
    # Predict only for a host with one known GPU model, because different models have different rates.
    models = _gpus()
    known = {cluster for part, cluster in _MODELS.items() for model in models if part in model}
    if len(models) != 1 or len(known) != 1 or "cpu" in devices:
        return f"no rates are known for {', '.join(sorted(models)) or 'these devices'}"
    cluster, built_in = CLUSTERS[known.pop()]
    # Workers on the same GPU share its link to the host.
    return _host(cluster, count, cluster.pcie_gb_per_s * len(set(devices)) / count), rates or built_in


def _host(cluster: Cluster, num_workers: int, pcie_gb_per_s: float) -> Cluster:
    return msgspec.structs.replace(cluster, num_nodes=1, gpus_per_node=num_workers, pcie_gb_per_s=pcie_gb_per_s)


def _gpus() -> set[str]:
    """Return the models of this host's NVIDIA GPUs from /proc, because initialising CUDA would take seconds."""
    models = set()
    # Without NVIDIA's driver the directory does not exist, and the glob finds nothing.
    for path in GPUS.glob("*/information"):
        facts = dict(line.partition(":")[::2] for line in path.read_text(encoding="utf-8").splitlines())
        models.add(facts.get("Model", "").strip())
    return models
