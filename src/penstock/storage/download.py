"""Whole files of a storage, copied to a local directory.

In: URIs of files, and the paths below a directory that they are copied to. Out: the files, their number of bytes.
Not here: which files a model has (`locate`, `list_uris`), what is in them (`weight_set`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.config import Settings
from penstock.errors import PlanError
from penstock.storage import Digested, Source, open_source
from penstock.storage.output import require_room, typed
from penstock.types import MIB

_PIECE_BYTES = 8 * MIB
# Reads under way at once: what hides the latency of an object store for one file or for many, in 128 MiB of buffers.
_THREADS = 16


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
) -> int:
    """Copy files of a storage to local paths, several ranges at once; return their bytes.

    Args:
        files: URI -> path. Directories are created, and a file that is there is replaced from its first byte on.
        settings: limits and the cache.
        storage_options: credentials and endpoints, as obstore names them.

    Raises:
        DiskFull, DestinationError: a path cannot be written.
        IntegrityError: a file differs from the digest that its storage has of it.
        SourceError: the storage failed, or a file changed while it was read.

    After an error the paths may hold parts of their files: copy to a directory that nobody reads, then rename.
    """

    def open_one(uri: str, path: Path) -> Source:
        source = stack.enter_context(closing(open_source(uri, settings=settings, storage_options=storage_options)))
        if isinstance(source, Digested):
            source.check_whole()
        with typed(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.truncate(source.nbytes)
        return source

    def copy_range(source: Source, path: Path, start: int) -> None:
        piece = memoryview(bytearray(min(_PIECE_BYTES, source.nbytes - start)))
        source.readv(start, [piece])
        with typed(path), open(path, "r+b", buffering=0) as file:
            file.seek(start)
            left = piece
            while left.nbytes:
                left = left[file.write(left) :]

    with ExitStack() as stack, ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-download") as pool:
        try:
            sources = list(pool.map(open_one, files.keys(), files.values()))
            # Before the first byte: a disk that fills up after an hour has cost the hour.
            if files:
                require_room(next(iter(files.values())), sum(source.nbytes for source in sources))
            ranges = [
                pool.submit(copy_range, source, path, start)
                for source, path in zip(sources, files.values(), strict=True)
                for start in range(0, source.nbytes, _PIECE_BYTES)
            ]
            for done in ranges:
                done.result()
        except BaseException:
            # Ranges that have not begun would be read for nothing. Those under way end before the sources are closed.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return sum(source.nbytes for source in sources)
