"""The peak of a process's own memory, without mapped files, while a block runs."""

from __future__ import annotations

import threading
from pathlib import Path


class OwnMemoryPeak:
    """The most memory of this process inside a block, above what it had before."""

    def __enter__(self) -> OwnMemoryPeak:
        self._before = self._most = _own_kb()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        """Return the peak in bytes."""
        return (self._most - self._before) << 10

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self._most = max(self._most, _own_kb())


def _own_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
