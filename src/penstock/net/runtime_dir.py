"""A directory of one process: private to the user, and swept by a later process when its owner died without leaving.

In: nothing. Out: a directory for the sockets of a door and of a data port.
Not here: the hub's files of one host (`local`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "penstock-member-"
_LOCK = "alive"


class RuntimeDir:
    """Made by the constructor, mode 0700; the kernel lets go of its lock when the process ends, however it ends."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_LOCK}.new"
        self._fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # never there without the lock on it

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _sweep(parent: Path) -> None:
    """Remove what dead members of this user left there."""
    for path in parent.glob(f"{_PREFIX}*"):
        # One without its lock yet is being made, or not ours to open.
        with contextlib.suppress(OSError):
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
