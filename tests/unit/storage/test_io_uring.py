"""The ring: lengths above 32 bits, and descriptors after an error."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.ring import ring_refused

from penstock.storage.io_uring import Uring

pytestmark = pytest.mark.skipif(bool(ring_refused()), reason=f"no io_uring: {ring_refused()}")


def test_read_above_4_gib_returns_available_bytes(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(b"weights")
    # The file is much shorter than the memory, and the kernel writes only its bytes.
    memory = np.zeros(mmap.PAGESIZE, np.uint8)
    ring = Uring.open(1, 1)
    with path.open("rb") as file:
        ring.queue_read(file.fileno(), 0, int(memory.ctypes.data), (4 << 30) + 1, 7)
        completions: list[tuple[int, int]] = []
        while not completions:
            completions = ring.wait(1.0)
    ring.close()
    assert completions == [(7, 7)]
    assert memory[:7].tobytes() == b"weights"


def test_failed_ring_mapping_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_mapped in (0, 1):
        left = num_mapped

        def refuse(fd: int, *args: int, **options: int) -> mmap.mmap:
            nonlocal left
            if left == 0:
                raise OSError(12, "Cannot allocate memory")
            left -= 1
            return mmap.mmap(fd, *args, **options)

        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            patch.setattr("penstock.storage.io_uring.mmap", SimpleNamespace(mmap=refuse))
            with pytest.raises(OSError, match="Cannot allocate"):
                Uring.open(8, 2)
        assert len(os.listdir("/proc/self/fd")) == len(before)
