"""Cache locality: find the tasks whose input a worker's cache already has, and count the bytes that were read.

In: a job; its sources as one process opened them. Out: tasks most of whose input is here; bytes read.
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
    return [file for source in sources for file in source.sources if isinstance(file, CachedSource)]


def shared_as(sources: Sequence[WeightSet]) -> str:
    """Return what workers have in common that read through one cache; empty: this one reads through none."""
    return next((file.shared_as for file in cached(sources)), "")


def bytes_read(sources: Sequence[WeightSet]) -> tuple[int, int]:
    """Return bytes of cached files read from their sources (whole chunks), and bytes that this process requested."""
    stats = [file.stats for file in cached(sources)]
    return sum(stat.miss_bytes for stat in stats), sum(stat.asked_bytes for stat in stats)


def cached_tasks(job: Job, sources: Sequence[WeightSet]) -> list[int]:
    """Return the tasks that have at least half of their input in the cache now."""
    files = [
        [_CachedRanges(file) if isinstance(file, CachedSource) else None for file in source.sources]
        for source in sources
    ]
    if not any(ranges is not None and ranges.any for of_source in files for ranges in of_source):
        return []
    tables = [source.manifest.tensors for source in sources]
    rows = [dict(zip(table.names, range(len(table)), strict=True)) for table in tables]
    tasks = []
    for task in range(len(job.tasks)):
        here = 0
        for index, start, stop in job.tasks.entries(task):
            for task_input in job.recipes[index].inputs:
                table, row = tables[task_input.source], rows[task_input.source][task_input.spec.name]
                file, at = files[task_input.source][int(table.file_index[row])], int(table.offset[row])
                first, last = task_input.leaf_range(start, stop, job.held_to[task_input.source])
                here += 0 if file is None else file.within(at + first, at + last)
        # Half, not all: the leaves at both ends of a task are shared with its neighbours and are often missing.
        if here and 2 * here >= int(job.read_bytes[task].sum()):
            tasks.append(task)
    return tasks


class _CachedRanges:
    """Bytes of one file that the cache has."""

    def __init__(self, source: CachedSource) -> None:
        count = -(-source.nbytes // CACHE_CHUNK_BYTES)
        # One chunk more than the file has, so that an offset at the very end of the file has an entry.
        self._has = np.zeros(count + 1, bool)
        self._has[[chunk for chunk in source.cached_chunks() if chunk < count]] = True
        self._before: I64 = np.concatenate([[0], np.cumsum(self._has * CACHE_CHUNK_BYTES)]).astype(np.int64)
        self.any = bool(self._has.any())

    def within(self, start: int, stop: int) -> int:
        """Return how many bytes of `[start, stop)` are in the cache."""
        return self._until(stop) - self._until(start)

    def _until(self, offset: int) -> int:
        chunk, more = divmod(offset, CACHE_CHUNK_BYTES)
        return int(self._before[chunk]) + (more if self._has[chunk] else 0)
