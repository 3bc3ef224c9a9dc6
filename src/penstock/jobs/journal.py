"""What is done of a job, on disk: finished tasks with the digests of what they wrote.

In: ends of tasks. Out: what an earlier run had done of the same job, and the leaves of the output.
Not here: the bytes (`storage.output`), whether they are still there (`resume`).

    {"job": key}                     one line each, appended, synced now and then: a line that was cut
    {"task": 7, "digests": "<hex>"}  short by a crash is as if its task had not run
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import DestinationError
from penstock.storage.output import typed
from penstock.types import U64


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    job: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    task: int
    digests: str


_HEAD = msgspec.json.Decoder(_Head)
_ENTRY = msgspec.json.Decoder(_Entry)


class Journal:
    """Append-only, of one job. One thread writes it.

    Args:
        path: of the file; made if it is not there.
        key: the job's.

    Attributes:
        done: digests by task, as earlier runs and this one left them.
        kept: those of earlier runs.

    Raises:
        DestinationError: the file is another job's, or cannot be written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.done, self.kept = path, dict[int, U64](), frozenset[int]()
        with typed(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                self._read(key)
            except BaseException:
                os.close(self._fd)
                raise

    def _read(self, key: str) -> None:
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = raw[: raw.rfind(b"\n") + 1]
        os.ftruncate(self._fd, len(whole))
        if not whole:
            os.write(self._fd, msgspec.json.encode(_Head(job=key)) + b"\n")
            return
        head, *lines = whole.splitlines()
        try:
            if _HEAD.decode(head).job != key:
                raise DestinationError("the journal is of another job", uri=str(self.path), hint="remove it")
            for line in lines:
                entry = _ENTRY.decode(line)
                self.done[entry.task] = np.frombuffer(bytes.fromhex(entry.digests), "<u8").astype(np.uint64)
        except (msgspec.DecodeError, ValueError) as error:
            raise DestinationError(f"the journal cannot be read: {error}", uri=str(self.path)) from error

    def add(self, task: int, digests: U64) -> None:
        """A task has written its bytes. DiskFull, DestinationError."""
        self.done[task] = digests
        line = msgspec.json.encode(_Entry(task=task, digests=digests.astype("<u8").tobytes().hex())) + b"\n"
        with typed(self.path):
            os.write(self._fd, line)

    def forget(self, tasks: Mapping[int, object]) -> None:
        """These did not last: write the journal anew without them."""
        kept = {task: digests for task, digests in self.done.items() if task not in tasks}
        with typed(self.path):
            head = os.pread(self._fd, 4096, 0).partition(b"\n")[0] + b"\n"
            os.ftruncate(self._fd, 0)
            os.write(self._fd, head)
        self.done = {}
        for task, digests in kept.items():
            self.add(task, digests)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
