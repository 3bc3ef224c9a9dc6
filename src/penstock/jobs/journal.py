"""The journal of a job on disk: its finished tasks, with the digests of the bytes they wrote.

In: finished tasks. Out: tasks that an earlier run of the same job finished, and the leaves of the output.
Not here: the bytes (`storage.output`), whether they are still on disk (`publish`).

    {"job": key}                     one line each, appended, never synced: after a crash the bytes on disk are
    {"task": 7, "digests": "<hex>"}  compared with it, and everything from the first unreadable line on is ignored
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import DestinationError, DiskFull
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
    """An append-only file of one job. One thread writes it; an exclusive lock keeps other processes out.

    Args:
        path: of the file; made if it is not there.
        key: the job's.

    Attributes:
        done: digests by task, as earlier runs and this one left them.
        kept: those of earlier runs.

    Raises:
        DestinationError: another process has it open, the file is another job's, or it cannot be written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.done = dict[int, U64]()
        self.kept = frozenset[int]()
        with typed(path):
            self._fd = _locked(path)
            try:
                self._read(key)
            except BaseException:
                if not os.fstat(self._fd).st_size:  # the disk is too full even for its first line: it is of no use
                    self.remove()
                os.close(self._fd)
                raise

    def _read(self, key: str) -> None:
        # A crash can leave half a line, or blocks of zeros: the lines before it are good, and only they are kept.
        whole = 0
        with suppress(msgspec.DecodeError, ValueError), open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if not whole:
                    if _HEAD.decode(line).job != key:
                        message = "the journal belongs to another job"
                        raise DestinationError(message, uri=str(self.path), hint="remove it")
                    whole = len(line)
                    continue
                entry = _ENTRY.decode(line)
                self.done[entry.task] = np.frombuffer(bytes.fromhex(entry.digests), "<u8").astype(np.uint64)
                whole += len(line)
        os.ftruncate(self._fd, whole)
        if not whole:
            self._write(msgspec.json.encode(_Head(job=key)) + b"\n")

    def add(self, task: int, digests: U64) -> None:
        """Record a task that has written its bytes. DiskFull, DestinationError."""
        self.done[task] = digests
        line = msgspec.json.encode(_Entry(task=task, digests=digests.astype("<u8").tobytes().hex())) + b"\n"
        with typed(self.path):
            self._write(line)

    def _write(self, line: bytes) -> None:
        if os.write(self._fd, line) < len(line):
            raise DiskFull("cannot write: part of a line was written", uri=str(self.path))

    def forget(self, tasks: Mapping[int, object]) -> None:
        """Rewrite the journal without these tasks, whose bytes are no longer what they wrote."""
        lasting = {task: digests for task, digests in self.done.items() if task not in tasks}
        # In place, not by a rename: the lock belongs to this file, and another process could open a new one.
        # A crash in between only forgets finished tasks, which are then run again.
        with typed(self.path):
            head = os.pread(self._fd, 4096, 0).partition(b"\n")[0] + b"\n"
            os.ftruncate(self._fd, 0)
            self._write(head)
        self.done = {}
        for task, digests in lasting.items():
            self.add(task, digests)

    def remove(self) -> None:
        """Delete the file: the job is published, or no task of it is done."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Notes(Journal):
    """A journal in memory, for a job whose output does not outlive its coordinator."""

    def __init__(self) -> None:
        self.done, self.kept, self._fd = dict[int, U64](), frozenset[int](), -1

    def add(self, task: int, digests: U64) -> None:
        """See `Journal.add`."""
        self.done[task] = digests


def _locked(path: Path) -> int:
    """Return the file, open for this process alone."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock was taken on an open file, but the path may name another one by now: see below.
            at_path = os.stat(path) if path.exists() else None
        except BlockingIOError as error:
            os.close(fd)
            raise DestinationError("another process runs this very job", uri=str(path), hint="wait for it") from error
        if at_path is not None and os.path.samestat(at_path, os.fstat(fd)):
            return fd
        os.close(fd)  # the process that had it finished and removed the file between our open and our lock: try again
