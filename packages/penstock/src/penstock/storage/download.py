"""Whole files of a storage, copied to a local directory.

In: URIs of files, and the paths below a directory that they are copied to. Out: the files, their number of bytes.
Not here: which files a model has (`locate`, `list_uris`), what is in them (`weight_set`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from penstock import descriptors
from penstock.config import Settings
from penstock.errors import PlanError
from penstock.storage import Digested, Source, open_source
from penstock.storage.output import require_room
from penstock.storage.source import require_checked
from penstock.storage.write import typed
from penstock.types import MIB
from penstock.waits import Threads

_PIECE_BYTES = 8 * MIB
# Reads under way at once: what hides the latency of an object store for one file or for many, in 128 MiB of buffers.
_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """The files that a `download` has copied."""

    nbytes: int
    compared: frozenset[str]
    """URIs of the files whose content was compared with the digest that the storage has of them."""


def inside(directory: Path, name: str, *, uri: str) -> Path:
    """Return the path of `name` below a directory.

    Raises:
        PlanError: it is outside, as one with `..` in it is.
    """
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
    """Copy files of a storage to local paths, several ranges at once.

    Args:
        files: URI -> path. Directories are created, and a file that is there is replaced from its first byte on.
        settings: limits and the cache.
        storage_options: credentials and endpoints, as obstore names them.
        on_file: called with the URI of each file that is complete and compared, in the order of `files`.
        on_bytes: called with the bytes of each range that was written, in the caller's thread like `on_file`.

    Raises:
        DiskFull, DestinationError: a path cannot be written.
        IntegrityError: a file differs from the digest that its storage has of it, or could not be compared in time.
        SourceError: the storage failed, or a file changed while it was read.

    After an error the paths may hold parts of their files: copy to a directory of your own, then rename it.
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

    # All sources stay open, and each thread has a file that it writes.
    descriptors.make_room(len(files) + _THREADS)
    compared: dict[str, Digested] = {}
    with ExitStack() as stack, Threads(_THREADS, thread_name_prefix="penstock-download") as pool:
        try:
            sources = list(pool.map(open_one, files.keys(), files.values()))
            # Before the first byte: a disk that fills up after an hour has cost the hour.
            if files:
                require_room(next(iter(files.values())), sum(source.nbytes for source in sources))
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
            # Ranges that have not begun would be read for nothing.
            pool.leave()
            raise
        return Downloaded(nbytes=sum(source.nbytes for source in sources), compared=frozenset(compared))


def _without_links(path: str, flags: int) -> int:
    """Open a file of a new directory. OSError: it is a link, which nobody but another user has made."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
