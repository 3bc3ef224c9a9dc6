"""What of a job's inputs is in a worker's cache already: so tasks go where their bytes are, and reports say what came.

In: a job; its sources as one process opened them. Out: tasks most of whose input is here; bytes that came.
Not here: the cache (`storage.cache`), who is given a task for it (`plan.placement`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.jobs.job import Job
from penstock.storage.cache import CACHE_CHUNK_BYTES, CachedSource
from penstock.storage.weight_set import WeightSet
from penstock.types import I64


def cached(sources: Sequence[WeightSet]) -> list[CachedSource]:
    """Return those of their files that are read through a cache."""
    return [one for source in sources for one in source.sources if isinstance(one, CachedSource)]


def shared_as(sources: Sequence[WeightSet]) -> str:
    """Return what workers have in common that read through one cache; empty: this one reads through none."""
    return next((one.shared_as for one in cached(sources)), "")


def came(sources: Sequence[WeightSet]) -> tuple[int, int]:
    """Bytes of cached files that this process read from their sources, whole chunks; and bytes that it asked for."""
    stats = [one.stats for one in cached(sources)]
    return sum(one.miss_bytes for one in stats), sum(one.asked_bytes for one in stats)


def cached_tasks(job: Job, sources: Sequence[WeightSet]) -> list[int]:
    """Tasks of whose input at least half is in the cache now."""
    files = [
        [_CachedRanges(one) if isinstance(one, CachedSource) else None for one in source.sources] for source in sources
    ]
    if not any(one is not None and one.any for some in files for one in some):
        return []
    tables = [source.manifest.tensors for source in sources]
    rows = [dict(zip(table.names, range(len(table)), strict=True)) for table in tables]
    found = []
    for task in range(len(job.tasks)):
        here = 0
        for index, start, stop in job.tasks.entries(task):
            for one in job.recipes[index].inputs:
                table, row = tables[one.source], rows[one.source][one.spec.name]
                file, at = files[one.source][int(table.file_index[row])], int(table.offset[row])
                first, last = one.leaf_range(start, stop, job.held_to[one.source])
                here += 0 if file is None else file.within(at + first, at + last)
        if here and 2 * here >= int(job.read_bytes[task].sum()):
            found.append(task)
    return found


class _CachedRanges:
    """Bytes of one file that the cache has."""

    def __init__(self, source: CachedSource) -> None:
        count = -(-source.nbytes // CACHE_CHUNK_BYTES)
        self._has = np.zeros(count + 1, bool)
        self._has[[chunk for chunk in source.cached_chunks() if chunk < count]] = True
        self._before: I64 = np.concatenate([[0], np.cumsum(self._has * CACHE_CHUNK_BYTES)]).astype(np.int64)
        self.any = bool(self._has.any())

    def within(self, start: int, stop: int) -> int:
        """Return how many of `[start, stop)`."""
        return self._until(stop) - self._until(start)

    def _until(self, offset: int) -> int:
        chunk, more = divmod(offset, CACHE_CHUNK_BYTES)
        return int(self._before[chunk]) + (more if self._has[chunk] else 0)
