"""Which tasks' inputs a cache has: what a worker of several hosts says when it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from penstock.config import Settings
from penstock.storage import cache
from penstock.storage.cache import CachedSource, open_cached
from penstock.storage.weight_set import WeightSet, open_weights
from penstock.testing.checkpoints import write_llama
from penstock_convert import job
from penstock_convert.job import ConversionJob, bytes_read, cached_tasks, plan_job, shared_as
from penstock_convert.operations.spec import operation_of

CHUNK = 64 << 10


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightSet:
    """A checkpoint of local files behind a cache that is empty."""
    for module in (cache, job):
        monkeypatch.setattr(module, "CACHE_CHUNK_BYTES", CHUNK)
    write_llama(tmp_path / "m", total_bytes=2_000_000, shards=2)
    settings = Settings(cache_dir=tmp_path / "cache")
    found = open_weights(tmp_path / "m", settings=settings)
    return msgspec.structs.replace(found, sources=tuple(open_cached(one, settings=settings) for one in found.sources))


def job_of(source: WeightSet) -> ConversionJob:
    return plan_job(operation_of(()), [source.manifest], task_bytes=256 << 10)


def read(source: WeightSet, file: int, chunks: Sequence[int]) -> int:
    """Bring these chunks of a file; bytes that were asked for."""
    opened, request = source.sources[file], 0
    for chunk in chunks:
        wanted = bytearray(min(10, opened.nbytes - chunk * CHUNK))
        opened.readv(chunk * CHUNK, [memoryview(wanted)])
        request += len(wanted)
    return request


def test_empty_cache_reserves_no_tasks(opened: WeightSet) -> None:
    assert cached_tasks(job_of(opened), [opened]) == []
    assert shared_as([opened])


def test_uncached_source_reserves_no_tasks(opened: WeightSet, tmp_path: Path) -> None:
    plain = open_weights(tmp_path / "m", settings=Settings())
    assert cached_tasks(job_of(plain), [plain]) == [] and shared_as([plain]) == "" and bytes_read([plain]) == (0, 0)


def test_only_tasks_with_cached_input_are_reserved(opened: WeightSet) -> None:
    job, source = job_of(opened), opened.sources[1]
    assert isinstance(source, CachedSource)
    request = read(opened, 1, range(-(-source.nbytes // CHUNK)))
    rows = {name: row for row, name in enumerate(opened.manifest.tensors.names)}
    of_one = {0: list[int](), 1: list[int]()}
    for task in range(len(job.tasks)):
        names = {one.spec.name for entry in job.tasks.entries(task) for one in job.recipes[entry[0]].inputs}
        files = {int(opened.manifest.tensors.file_index[rows[name]]) for name in names}
        if len(files) == 1:  # others are small tensors of both
            of_one[files.pop()].append(task)
    found = cached_tasks(job, [opened])
    assert of_one[0] and of_one[1]
    assert set(of_one[1]) <= set(found) and not set(of_one[0]) & set(found)
    assert bytes_read([opened]) == (source.nbytes, request)


def test_task_is_reserved_once_half_its_input_is_cached(opened: WeightSet) -> None:
    """Of one tensor: chunks from its first on, until the task that reads it is held."""
    job, table = job_of(opened), opened.manifest.tensors
    task = int(job.tasks.in_bytes.argmax())
    ((index, start, stop),) = job.tasks.entries(task)
    (given,) = job.recipes[index].inputs
    row = table.names.index(given.spec.name)
    first, last = given.byte_range(start, stop)
    low, high = int(table.offset[row]) + first, int(table.offset[row]) + last
    for chunk in range(low // CHUNK, -(-high // CHUNK)):
        here = max(0, chunk * CHUNK - low)
        assert (task in cached_tasks(job, [opened])) == (2 * here >= high - low > 0)
        read(opened, int(table.file_index[row]), [chunk])
    assert task in cached_tasks(job, [opened])
