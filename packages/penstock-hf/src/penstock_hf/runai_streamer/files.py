"""Read ranges of files and objects in parallel, and yield the ranges as they arrive: `FileStreamer` and `FileChunks`.

Each result is `(file id, chunk index, uint8 tensor [1, nbytes])`. The caller owns the tensor.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Self

import torch

from penstock.errors import ConfigError
from penstock.spi import Settings, Source, Threads, open_source, text_of
from penstock_hf.runai_streamer.objects import (
    S3Credentials,
    is_object,
    list_objects,
    matching,
    raising_value_errors,
    storage_options,
)
from penstock_hf.runai_streamer.settings import runai_settings

RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME = "RUNAI_STREAMER_MEMORY_LIMIT"
RUNAI_STREAMER_RING_BUFFERS_ENV_VAR_NAME = "RUNAI_STREAMER_RING_BUFFERS"
RUNAI_STREAMER_MAX_PADS_PER_BUFFER_ENV_VAR_NAME = "RUNAI_STREAMER_MAX_PADS_PER_BUFFER"
"""Names that code for the original package imports. The last two have no effect, because there is no ring buffer."""

_THREADS = 16
"""Number of reading threads if RUNAI_STREAMER_CONCURRENCY is not set. Source: `config.REMOTE_FETCH_THREADS`."""


class FileChunks:
    """A file and the ranges to read from it, at any offsets and in any order. The caller chooses `id`."""

    def __init__(self, id: int, path: str, offsets: list[int], sizes: list[int]) -> None:
        if len(offsets) != len(sizes):
            raise ValueError(f"got {len(offsets)} offsets but {len(sizes)} sizes")
        self.id = id
        self.path = path
        self.offsets = offsets
        self.sizes = sizes

    @staticmethod
    def contiguous(id: int, path: str, offset: int, sizes: list[int]) -> FileChunks:
        """Return consecutive ranges with these sizes, starting at `offset`."""
        return FileChunks(id, path, list(itertools.accumulate(sizes[:-1], initial=offset))[: len(sizes)], sizes)

    def total_size(self) -> int:
        """Return the number of bytes in all ranges."""
        return sum(self.sizes)

    def max_chunk_size(self) -> int:
        """Return the number of bytes in the largest range."""
        return max(self.sizes)

    def __repr__(self) -> str:
        return f"FileChunks(id={self.id}, path={self.path!r}, {len(self.sizes)} ranges, {self.total_size()} bytes)"


class FileStreamer:
    """Reads ranges of files in parallel. A context manager.

    The memory limit bounds the bytes that are read but not yet consumed. A single range may be larger than the limit.
    """

    def __init__(self) -> None:
        self._pool: Threads | None = None
        self._sources: list[Source] = []
        self._running: dict[Future[torch.Tensor], tuple[int, int, int]] = {}
        self._left: deque[tuple[Source, int, int, int, int]] = deque()
        self._limit_bytes = 0
        self._device = torch.device("cpu")
        self._spare: list[torch.Tensor] | None = None

    def __enter__(self) -> Self:
        settings = runai_settings()
        self._pool = Threads(settings.fetch_threads or _THREADS, "penstock-runai", waits_for_calls=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Set the pool to None first, because an active iterator of `get_chunks` must not start more reads.
        pool, self._pool = self._pool, None
        self._drain()
        if pool is not None:
            pool.close()

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        memory_limit: int | None = None,
        owned: bool = True,
    ) -> None:
        """Start reading the requested ranges.

        Args:
            file_stream_requests: the ranges to read, all from local files or all from the same kind of object store.
            credentials: credentials that override the environment.
            device: device of the yielded tensors.
            memory_limit: maximum number of bytes that are read but not yet consumed. A range may exceed the limit.
            owned: if True, the caller owns each range. If `owned` is False, a range on the CPU is valid until the next
                range is yielded, because its memory is reused.

        Raises:
            ValueError: this is called outside a `with` block, the previous stream was not read to its end, the paths
                are in different kinds of storage, the device is unknown, or a file cannot be opened.
        """
        if self._pool is None:
            raise ValueError("Streamer not initialized")
        if self._running or self._left:
            raise ValueError(
                f"cannot start a new stream while {len(self._running) + len(self._left)} ranges of the last "
                "stream are outstanding: read that stream to its end, or close the iterator of get_chunks()"
            )
        with raising_value_errors():
            for request in file_stream_requests:
                text_of(request.path)
        stores = {r.path.partition("://")[0] if is_object(r.path) else "" for r in file_stream_requests}
        if len(stores) > 1:
            raise ValueError("Cannot stream files from multiple source types in parallel")
        self._drain()
        with raising_value_errors():
            settings = Settings.read()
            limits = runai_settings()
            try:
                self._device = torch.device("cpu" if device is None else device)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(f"invalid device {device!r}") from error
            limit = limits.memory_bytes if memory_limit is None or memory_limit <= 0 else memory_limit
            self._limit_bytes = limit or settings.memory_bytes
            self._spare = None if owned and self._device.type == "cpu" else []
            for request in file_stream_requests:
                options = storage_options(request.path, credentials)
                # Open the file here instead of in the reading threads, so that this call reports a missing file.
                source = open_source(request.path, settings=settings, storage_options=options)
                self._sources.append(source)
                ranges = zip(request.offsets, request.sizes, strict=True)
                self._left.extend((source, request.id, i, at, n) for i, (at, n) in enumerate(ranges))
            self._submit()

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield every range as it arrives: `(FileChunks.id, index of the range, [1, nbytes] uint8 on the device)`.

        Raises:
            ValueError: this is called outside a `with` block, or a range cannot be read. The remaining ranges are
                dropped.
        """
        if self._pool is None:
            raise ValueError("Streamer not initialized")
        try:
            while self._running:
                done, _ = wait(self._running, return_when=FIRST_COMPLETED)
                for future in done:
                    id, index, nbytes = self._running.pop(future)
                    with raising_value_errors():
                        tensor = future.result()
                    # Start the next reads before the `yield`, so that they run while the caller uses this range.
                    self._submit()
                    yield id, index, tensor[:nbytes].to(self._device).view(1, -1)
                    if self._spare is not None:
                        self._spare.append(tensor)
        finally:
            self._drain()

    def list_files(
        self,
        prefix: str,
        is_recursive: bool = True,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> list[tuple[str, int]]:
        """Return the objects under a prefix, or the files in a directory, with their sizes.

        This method also works outside a `with` block.
        """
        with raising_value_errors():
            settings = Settings.read()
            if not is_object(prefix):
                return _list_local(prefix, is_recursive, allow_patterns, ignore_patterns)
            sizes = []
            options = storage_options(prefix, None)
            uris = list_objects(prefix, None, recursive=is_recursive, allow=allow_patterns, ignore=ignore_patterns)
            for uri in uris:
                source = open_source(uri, settings=settings, storage_options=options)
                sizes.append((uri, source.nbytes))
                source.close()
            return sizes

    def _submit(self) -> None:
        """Start at least one read, and more while the bytes read but not yet consumed stay within the limit."""
        assert self._pool is not None
        under_way = sum(nbytes for _, _, nbytes in self._running.values())
        while self._left and (not self._running or under_way + self._left[0][4] <= self._limit_bytes):
            source, id, index, offset, nbytes = self._left.popleft()
            # Replace a buffer that is too small, so that the number of buffers never exceeds the number of reads.
            memory = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
            if memory.nbytes < nbytes:
                # A GPU copies from pinned memory several times as fast.
                memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._running[self._pool.submit(_read, source, offset, memory, nbytes)] = (id, index, nbytes)
            under_way += nbytes

    def _drain(self) -> None:
        """Cancel the reads that have not started, wait for the running reads, and close the files."""
        self._left.clear()
        for future in self._running:
            future.cancel()
        wait(self._running)
        self._running.clear()
        self._spare = None
        for source in self._sources:
            source.close()
        self._sources.clear()


class DistributedStreamer:
    """A `FileStreamer` whose `stream_files` also accepts `is_distributed`, but ignores this argument."""

    # Only `SafetensorsStreamer` divides reads between ranks.

    def __init__(self) -> None:
        self.file_streamer = FileStreamer()

    def __enter__(self) -> Self:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file_streamer.__exit__(exc_type, exc, trace)

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None,
        device: str | torch.device | None,
        is_distributed: bool,
        owned: bool = True,
    ) -> None:
        """See `FileStreamer.stream_files`."""
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See `FileStreamer.get_chunks`."""
        return self.file_streamer.get_chunks()

    def ring_info(self) -> None:
        """Return None, as the original does before its first read. This implementation has no ring buffer."""


def _read(source: Source, offset: int, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Read bytes from a source into the beginning of `memory`, a uint8 tensor on the host, and return it."""
    source.readv(offset, [memory[:nbytes].numpy().data])
    return memory


def _list_local(
    prefix: str, recursive: bool, allow: Sequence[str] | None, ignore: Sequence[str] | None
) -> list[tuple[str, int]]:
    """Return the matching files in a directory with their sizes."""
    files = []
    for folder, folders, names in os.walk(prefix):
        # `os.walk` descends only into the folders that remain in this list.
        if not recursive:
            folders.clear()
        for name in names:
            path = os.path.join(folder, name)
            files.append((path, os.path.getsize(path)))
    matched = set(matching([path for path, _ in files], allow, ignore))
    return sorted((path, nbytes) for path, nbytes in files if path in matched)
