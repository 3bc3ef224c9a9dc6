"""The report of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.report import Summarised, bytes_text
from penstock.telemetry.metrics import Outcome
from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePath:
    """The number of bytes of a file that were read through one path."""

    uri: str
    nbytes: int
    """Bytes read through this path, including gaps that were read instead of skipped."""
    path: str
    """`mmap`, `page-cache`, `direct`, `buffered`, `http`, `obstore`, `cache`, `memory`, `group` (another rank)."""
    why: str
    """Why no faster path was taken. Empty for the fastest path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Summarised):
    """The result of one load."""

    uri: str
    device: str
    num_tensors: int
    nbytes: int
    """Number of bytes at the destination."""
    read_bytes: int
    """Number of bytes that this process read from storage."""
    wall_s: float
    phases: Mapping[str, float]
    """Seconds in the phases `open`, `plan`, `allocate`, `move` and `finish`. Their sum is `wall_s`."""
    busy_s: Mapping[str, float]
    """Seconds that each executor spent in steps, summed over its threads. Executors overlap."""
    peak_staging_bytes: int
    peak_rss_bytes: int
    """Peak resident set size of the process in bytes, including the time before the load."""
    peak_device_bytes: int
    """Peak memory of torch's allocator on the device in bytes. 0 on the CPU."""
    files: tuple[FilePath, ...]
    verified: bool
    why: str
    """How the tensors were verified, or why they were not."""
    revision: str

    @property
    def gb_per_s(self) -> float:
        """Return the decimal GB that arrived at the destination per second of wall time."""
        return self.nbytes / GB / self.wall_s if self.wall_s else 0.0

    def paths(self) -> str:
        """Return the paths with their bytes, and why no faster path was taken."""
        by_path: dict[str, int] = {}
        for file in self.files:
            key = f"{file.path} ({file.why})" if file.why else file.path
            by_path[key] = by_path.get(key, 0) + file.nbytes
        return ", ".join(f"{bytes_text(nbytes)} by {path}" for path, nbytes in by_path.items())

    def summary(self) -> str:
        """Return three lines of text for users."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        return (
            f"{self.num_tensors} tensors, {bytes_text(self.nbytes)} -> {self.device} in {self.wall_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s): {phases}\n"
            f"paths: {self.paths() or 'none'}; staging peak {bytes_text(self.peak_staging_bytes)}\n"
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}"
        )


def outcome_of(report: LoadReport) -> Outcome:
    """Return the values that metrics and spans show for a load."""
    return Outcome(
        nbytes=report.nbytes,
        phases=report.phases,
        verified_bytes=report.nbytes if report.verified else 0,
        path=report.paths(),
        attributes={"uri": report.uri, "device": report.device, "revision": report.revision},
    )
