"""The directory of a process with views of commits: links to small files of the hub's cache, and pointer files.

In: places below `ProcessViews.root`, the text of pointers. Out: files that all blocks of the process see.
Not here: which files a view has, what a pointer stands for (`hub_files`).

Blocks share it, because the links outlive them: a tokenizer keeps the paths of its files, and copies them when it is
saved. So a process has one directory for each commit, however many blocks it runs.
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
    """The views of one process; a forked child has its own."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = threading.Lock()
        # Blocks that have a pointer, by its place: it stays until the last of them ends.
        self._num_blocks: dict[Path, int] = {}

    @property
    def root(self) -> Path:
        """Return the directory, made on first use and removed when the process ends."""
        with self._lock:
            return self._make_root()

    @property
    def is_made(self) -> bool:
        """Return whether the directory is there."""
        return self._root is not None

    def link(self, source: Path, directory: Path) -> None:
        """Link all files of `source`, if it is there, into a directory of a view; those linked before stay."""
        with self._lock:
            directory.mkdir(parents=True, exist_ok=True)
            for path in source.rglob("*") if source.is_dir() else ():
                place = directory / path.relative_to(source)
                if path.is_dir():
                    place.mkdir(parents=True, exist_ok=True)
                elif not os.path.lexists(place):
                    place.symlink_to(path)

    def add(self, place: Path, text: bytes) -> None:
        """Write a pointer file for a block, in place of a link. Order: once for a block; `remove` ends it."""
        with self._lock:
            self._num_blocks[place] = self._num_blocks.get(place, 0) + 1
            # Written once: another thread may be about to open it.
            if self._num_blocks[place] == 1:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)
                place.write_bytes(text)

    def remove(self, places: Iterable[Path]) -> None:
        """Remove a block's pointers that no other block has, and the directories that are empty then."""
        with self._lock:
            for place in places:
                # 0: this process was forked in the block, and the file is its parent's.
                num_blocks = self._num_blocks.pop(place, 0)
                if num_blocks > 1:
                    self._num_blocks[place] = num_blocks - 1
                elif num_blocks:
                    place.unlink(missing_ok=True)
                    self._prune(place.parent)

    def forget(self) -> None:
        """In a forked child: leave the files to the parent. Another of its threads may have held the lock."""
        self._root, self._lock, self._num_blocks = None, threading.Lock(), {}

    def _prune(self, directory: Path) -> None:
        # `rmdir` fails at the first directory that has other files.
        with suppress(OSError):
            while directory != self._root:
                directory.rmdir()
                directory = directory.parent

    def _make_root(self) -> Path:
        if self._root is None:
            self._root = make_directory()
        return self._root


def make_directory() -> Path:
    """Return a new private directory, which is removed when the process ends."""
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="penstock-view-")))
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, pid: int) -> None:
    # A forked child ends with a copy of this finalizer; the directory is its parent's.
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


views = ProcessViews()
os.register_at_fork(after_in_child=views.forget)
