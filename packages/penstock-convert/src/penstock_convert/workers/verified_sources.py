"""Reads from the sources of a conversion, compared with the digests of the sources."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.engine.check import TensorChecker
from penstock.errors import IntegrityError
from penstock.storage.cache import CachedSource
from penstock.storage.weight_set import WeightSet
from penstock_convert.job import bytes_read


class VerifiedSources:
    """The opened sources of a job, in the job's order. Several threads may read at a time.

    Args:
        sources: the opened sources. The caller closes them.
        leaf_sizes: size of a leaf of each source in bytes, or 0 for a source without digests.
    """

    def __init__(self, sources: Sequence[WeightSet], leaf_sizes: Sequence[int]) -> None:
        self._sources = sources
        self._rows = [{name: i for i, name in enumerate(source.manifest.tensors.names)} for source in sources]
        both = zip(sources, leaf_sizes, strict=True)
        self._checkers = [TensorChecker(source.manifest) if leaf_bytes else None for source, leaf_bytes in both]
        # Threads update the count concurrently, and `+=` on an attribute is not atomic.
        self._counting = threading.Lock()
        self._fetched_bytes = 0

    def read(self, source: int, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with a tensor's bytes, beginning at `offset`.

        Raise IntegrityError if a leaf's digest does not match.
        """
        table = self._sources[source].manifest.tensors
        row = self._rows[source][name]
        file = self._sources[source].sources[int(table.file_index[row])]
        at, checker = int(table.offset[row]) + offset, self._checkers[source]
        file.readv(at, [into])
        if checker is not None:
            try:
                checker.check(row, offset, into, uri=file.uri)
            except IntegrityError:
                if not isinstance(file, CachedSource) or not file.forget(at, into.nbytes):
                    raise
                # The corruption may be only in the cached copy, so read the bytes once more from the source.
                file.readv(at, [into])
                checker.check(row, offset, into, uri=file.uri)
        if not isinstance(file, CachedSource):
            with self._counting:
                self._fetched_bytes += into.nbytes

    def bytes_read(self) -> tuple[int, int]:
        """Return the bytes read from the sources, and the bytes requested from the sources or from a cache."""
        fetched_bytes, asked_bytes = bytes_read(self._sources)
        return self._fetched_bytes + fetched_bytes, self._fetched_bytes + asked_bytes

    def largest_leaves(self, leaf_sizes: Sequence[int]) -> list[int]:
        """Return the size of the largest leaf of each source in bytes. No leaf is larger than its tensor."""
        tables = [source.manifest.tensors for source in self._sources]
        return [min(leaf, int(t.nbytes.max(initial=0))) for leaf, t in zip(leaf_sizes, tables, strict=True)]
