"""Copies of whole files from a storage to local paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from penstock import descriptors
from penstock.config import Settings
from penstock.errors import PlanError
from penstock.storage import Digested, Source, open_source
from penstock.storage.output import require_space
from penstock.storage.source import require_checked
from penstock.storage.write import typed
from penstock.types import MIB
from penstock.waits import Threads

_PIECE_BYTES = 8 * MIB
# Concurrent reads hide the latency of an object store. Their buffers take 128 MiB in total.
_THREADS = 16


class Downloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a `download`."""

    nbytes: int
    compared: frozenset[str]
    """URIs of the files whose content was checked against the storage's digest."""


def inside(directory: Path, name: str, *, uri: str) -> Path:
    """Return the path of `name` below a directory. Raises PlanError if the path leaves the directory, as with `..`."""
    root = directory.resolve()
    path = (root / name.lstrip("/")).resolve()
    if not path.is_relative_to(root) or path == root:
        raise PlanError("the file would be written outside the destination", uri=uri)
    return path


def download(
    files: Mapping[str, Path],
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
    on_file: Callable[[str], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Downloaded:
    """Copy files from a storage to local paths, several ranges at once.

    After an error the paths may hold incomplete files, so copy to a temporary directory and rename it.

    Args:
        files: local path by URI. Directories are created, and existing files are overwritten.
        on_file: called in this thread with the URI of each complete and verified file, in the order of `files`.
        on_bytes: called in this thread with the size of each range written.

    Raises:
        DiskFull, DestinationError: a path cannot be written.
        IntegrityError: a file does not match the storage's digest, or the digest could not be checked in time.
        SourceError: the storage failed, or a file changed while it was read.
    """

    def open_one(uri: str, path: Path) -> Source:
        source = stack.enter_context(closing(open_source(uri, settings=settings, storage_options=storage_options)))
        if isinstance(source, Digested) and source.check_whole() and source.nbytes:
            compared[uri] = source
        with typed(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb", opener=_without_links) as file:
                file.truncate(source.nbytes)
        return source

    def copy_range(source: Source, path: Path, start: int) -> int:
        piece = memoryview(bytearray(min(_PIECE_BYTES, source.nbytes - start)))
        source.readv(start, [piece])
        with typed(path), open(path, "r+b", buffering=0, opener=_without_links) as file:
            file.seek(start)
            left = piece
            while left.nbytes:
                left = left[file.write(left) :]
        return piece.nbytes

    descriptors.make_room(len(files) + _THREADS)
    compared: dict[str, Digested] = {}
    with ExitStack() as stack, Threads(_THREADS, thread_name_prefix="penstock-download") as pool:
        try:
            sources = list(pool.map(open_one, files.keys(), files.values()))
            # Check the space first, because a large download may take an hour.
            if files:
                require_space(next(iter(files.values())), sum(source.nbytes for source in sources))
            ranges = [
                [pool.submit(copy_range, source, path, start) for start in range(0, source.nbytes, _PIECE_BYTES)]
                for source, path in zip(sources, files.values(), strict=True)
            ]
            for uri, ranges_of_file in zip(files, ranges, strict=True):
                for done in ranges_of_file:
                    nbytes = done.result()
                    if on_bytes is not None:
                        on_bytes(nbytes)
                if uri in compared:
                    require_checked(compared[uri])
                if on_file is not None:
                    on_file(uri)
        except BaseException:
            pool.leave()
            raise
        return Downloaded(nbytes=sum(source.nbytes for source in sources), compared=frozenset(compared))


def _without_links(path: str, flags: int) -> int:
    """Open a file without following symlinks, because only another user can have created a symlink here."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
