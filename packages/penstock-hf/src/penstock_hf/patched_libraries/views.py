"""The commit views of a process: directories with pointer files and symlinks to small files in the hub's cache.

All contexts of `patched_libraries()` share these directories. The symlinks must outlive the contexts, because a
tokenizer stores the paths of its files, and copies the files when it is saved.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class ProcessViews:
    """The commit views of one process. A forked child has separate views."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = threading.Lock()
        # Number of contexts that use each pointer file, by the file's path.
        self._num_blocks: dict[Path, int] = {}

    @property
    def root(self) -> Path:
        """Return the directory for all views, which is created on first use and removed when the process exits."""
        with self._lock:
            return self._make_root()

    @property
    def is_made(self) -> bool:
        """Return whether the directory has been created."""
        return self._root is not None

    def link(self, source: Path, directory: Path) -> None:
        """Create symlinks in `directory` to all files in `source`, if `source` exists. Existing symlinks stay."""
        with self._lock:
            directory.mkdir(parents=True, exist_ok=True)
            for path in source.rglob("*") if source.is_dir() else ():
                place = directory / path.relative_to(source)
                if path.is_dir():
                    place.mkdir(parents=True, exist_ok=True)
                elif not os.path.lexists(place):
                    place.symlink_to(path)

    def add(self, place: Path, text: bytes) -> None:
        """Write a pointer file for a context, in place of any symlink.

        Call this once per context, and call `remove` afterwards.
        """
        with self._lock:
            self._num_blocks[place] = self._num_blocks.get(place, 0) + 1
            # Write the file only once, because another thread may be about to open it.
            if self._num_blocks[place] == 1:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)
                place.write_bytes(text)

    def remove(self, places: Iterable[Path]) -> None:
        """Remove a context's pointer files that no other context uses, and directories that become empty."""
        with self._lock:
            for place in places:
                # The count is 0 if this process was forked inside the context. The file then belongs to the parent.
                num_blocks = self._num_blocks.pop(place, 0)
                if num_blocks > 1:
                    self._num_blocks[place] = num_blocks - 1
                elif num_blocks:
                    place.unlink(missing_ok=True)
                    self._prune(place.parent)

    def forget(self) -> None:
        """In a forked child, leave the files to the parent and replace the lock, which another thread may have held."""
        self._root, self._lock, self._num_blocks = None, threading.Lock(), {}

    def _prune(self, directory: Path) -> None:
        # `rmdir` fails at the first directory that contains other files.
        with suppress(OSError):
            while directory != self._root:
                directory.rmdir()
                directory = directory.parent

    def _make_root(self) -> Path:
        if self._root is None:
            self._root = make_directory()
        return self._root


def make_directory() -> Path:
    """Return a new private directory, which is removed when the process exits."""
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="penstock-view-")))
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, pid: int) -> None:
    # A forked child also runs this finalizer when it exits, but the directory belongs to the parent.
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


views = ProcessViews()
os.register_at_fork(after_in_child=views.forget)
