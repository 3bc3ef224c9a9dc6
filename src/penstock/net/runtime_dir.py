"""Runtime directory of one process: private to the user; a later process removes it if its owner died.

In: nothing. Out: a directory for the sockets of a member's server and of a data port.
Not here: the files of this host's hub (`hub.local_hub`).
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
    """A temporary directory with mode 0700, made by the constructor, and locked while this process lives.

    The kernel releases the lock when the process ends in any way, so the lock tells whether the owner still lives.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_LOCK}.new"
        self._fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        # Renamed only once it is locked: a sweep of another process must never see the lock file unlocked.
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the directory and release its lock. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _sweep(parent: Path) -> None:
    """Remove the runtime directories that dead processes of this user left in `parent`."""
    for path in parent.glob(f"{_PREFIX}*"):
        # An OSError: the directory has no lock file yet (it is being made), belongs to another user, or is in use.
        with contextlib.suppress(OSError):
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
