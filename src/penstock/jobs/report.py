"""Report of a conversion: bytes read and verified, tasks, measured and predicted seconds, each worker.

In: measurements of a run. Out: a frozen value.
Not here: the run (`convert`), how it is printed (`cli.convert`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.jobs.workers.launch import WorkerStats
from penstock.report import Summarised
from penstock.storage.weight_set import WeightSet
from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport(Summarised):
    """The measurements of one conversion."""

    uri: str
    """The destination."""
    revision: str
    operation: str
    num_tensors: int
    nbytes: int
    """Of the result's tensors."""
    read_bytes: int
    """Of the tasks done in this run, as planned; where they are verified, out to the ends of leaves."""
    verified_bytes: int
    """Of these, those that were compared with the digests of their source's manifest."""
    fetched_bytes: int
    """Read from the sources by this process and its workers; through a cache whole chunks, headers too."""
    held_bytes: int
    """Read from the caches of the workers' hosts instead."""
    num_tasks: int
    num_resumed: int
    """Tasks that an earlier run had done."""
    num_stolen: int
    num_twice: int
    num_workers: int
    """Workers that ran at the same time."""
    wall_s: float
    start_s: float
    """Of these, to the first worker's readiness."""
    moving_s: float
    """Of these, from the first worker's readiness to the last task's end."""
    predicted_s: float | None
    """Duration by the simulation."""
    predicted_by: str
    """The basis of the prediction, or why there is none."""
    busy_s: Mapping[str, float]
    """Per executor, summed over workers and their threads."""
    workers: tuple[WorkerStats, ...]
    peak_bytes: int
    """Most host memory that any worker's tasks held at once."""
    verified: bool
    """Everything that was read of the sources, in this run and earlier ones, was compared with digests."""
    left_out: tuple[str, ...]
    """Files of safetensors in the sources' directories that are not of their weight sets, and were not read."""
    why: str
    """How it was verified, or why not. The result's own digests are always of the bytes as they were made."""

    def summary(self) -> str:
        """Return a few lines for people."""
        done = f"{self.num_tasks} tasks by {self.num_workers} workers"
        resumed = f", {self.num_resumed} of an earlier run" if self.num_resumed else ""
        lines = [
            f"{self.uri}: {self.operation}: {self.num_tensors} tensors, {self.nbytes / GB:.2f} GB of "
            f"{self.read_bytes / GB:.2f} GB read in {self.wall_s:.3f} s ({self.gb_per_s:.2f} GB/s); {done}{resumed}",
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}",
        ]
        return "\n".join(lines + [f"left out: {name}" for name in self.left_out])

    @property
    def gb_per_s(self) -> float:
        """Return gigabytes read per second."""
        return self.read_bytes / GB / self.wall_s if self.wall_s else 0.0

    @property
    def end_s(self) -> float:
        """Return the seconds of `wall_s` after the last task's end: the manifest, publishing, ending processes."""
        return self.wall_s - self.start_s - self.moving_s

    @property
    def off_by(self) -> float | None:
        """Return the difference from the prediction as a share: 0.1 is a tenth longer. None without a prediction."""
        return self.moving_s / self.predicted_s - 1.0 if self.predicted_s and self.moving_s else None

    @property
    def utilisation(self) -> dict[str, float]:
        """Return the mean number of busy threads of each executor, over `num_workers` and `wall_s`."""
        return {name: busy_s / (self.wall_s * max(1, self.num_workers)) for name, busy_s in self.busy_s.items()}


def how_verified(sources: Sequence[WeightSet], *, verify: bool) -> str:
    """Return what `ConvertReport.why` says."""
    bare = [weights.why_unverified for weights in sources if weights.why_unverified is not None]
    if not verify:
        return "verify=False"
    if bare:
        return f"{len(bare)} of {len(sources)} sources was not: {bare[0]}"
    return "leaf digests compared where they were read"
