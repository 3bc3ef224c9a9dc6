"""Report of a load: seconds by phase, bytes by path, peaks, verified or why not.

In: measurements of a session. Out: frozen values and a few lines for people.
Not here: progress while it runs (`progress`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.report import Summarised
from penstock.types import GB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePath:
    """The path a file's bytes took. A file read by two paths has two of these."""

    uri: str
    nbytes: int
    """Bytes read this way, over-read included."""
    path: str
    """`mmap`, `page-cache`, `direct`, `buffered`, `http`, `obstore`, `cache`, `memory`, `group` (another rank)."""
    why: str
    """Why not a faster one; "" where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Summarised):
    """Outcome of one load."""

    uri: str
    device: str
    num_tensors: int
    nbytes: int
    """Bytes at the destination."""
    read_bytes: int
    """Bytes asked of storage by this process."""
    wall_s: float
    phases: Mapping[str, float]
    """Seconds of `open`, `plan`, `allocate`, `move`, `finish`; they sum to `wall_s`."""
    busy_s: Mapping[str, float]
    """Seconds inside steps per executor, summed over its threads; overlapping."""
    peak_staging_bytes: int
    peak_rss_bytes: int
    """Largest resident set of the process so far."""
    peak_device_bytes: int
    """Most that torch's allocator ever had in use on the device; 0 on the CPU."""
    files: tuple[FilePath, ...]
    verified: bool
    why: str
    """How it was verified, or why not."""
    revision: str

    @property
    def gb_per_s(self) -> float:
        """Decimal GB at the destination per second of wall time."""
        return self.nbytes / GB / self.wall_s if self.wall_s else 0.0

    def summary(self) -> str:
        """Return three lines for people."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        by_path: dict[str, int] = {}
        for file in self.files:
            key = f"{file.path} ({file.why})" if file.why else file.path
            by_path[key] = by_path.get(key, 0) + file.nbytes
        paths = ", ".join(f"{nbytes / GB:.2f} GB by {path}" for path, nbytes in by_path.items())
        return (
            f"{self.num_tensors} tensors, {self.nbytes / GB:.2f} GB -> {self.device} in {self.wall_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s): {phases}\n"
            f"paths: {paths or 'none'}; staging peak {self.peak_staging_bytes / MIB:.0f} MiB\n"
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}"
        )


@dataclass(slots=True)
class Phases:
    """A stopwatch whose phases sum to the whole."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)
    _name: str = "open"

    def enter(self, name: str) -> None:
        """End the running phase and begin `name`."""
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def stop(self) -> dict[str, float]:
        """End the running phase; return all phases by name."""
        self.enter(self._name)
        return dict(self.seconds)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Spend the block in `name`, then go back to the phase before."""
        before = self._name
        self.enter(name)
        yield
        self.enter(before)
