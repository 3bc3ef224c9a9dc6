"""The report of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from penstock.report import TransferStats, bytes_text, phases_text


class FilePath(msgspec.Struct, frozen=True, kw_only=True):
    """The number of bytes of a file that were read through one path."""

    uri: str
    nbytes: int
    """Bytes read through this path, including gaps that were read instead of skipped."""
    path: str
    """`mmap`, `page-cache`, `direct`, `buffered`, `http`, `obstore`, `cache`, `memory`, `group` (another rank)."""
    why: str
    """Why no faster path was taken. Empty for the fastest path."""


class LoadReport(TransferStats, frozen=True, kw_only=True):
    """The result of one load. The phases are `open`, `plan`, `allocate`, `move` and `finish`, whose sum is `wall_s`."""

    uri: str
    device: str
    num_tensors: int
    read_bytes: int
    """Number of bytes that this process read from storage."""
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

    @property
    def path(self) -> str:
        """Return the paths with their bytes, and why no faster path was taken."""
        by_path: Counter[str] = Counter()
        for file in self.files:
            by_path[f"{file.path} ({file.why})" if file.why else file.path] += file.nbytes
        return ", ".join(f"{bytes_text(nbytes)} by {path}" for path, nbytes in by_path.items())

    def summary(self) -> str:
        """Return three lines of text for users."""
        return (
            f"{self.num_tensors} tensors, {bytes_text(self.nbytes)} -> {self.device} in {self.wall_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s): {phases_text(self.phases)}\n"
            f"paths: {self.path or 'none'}; staging peak {bytes_text(self.peak_staging_bytes)}\n"
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}"
        )
