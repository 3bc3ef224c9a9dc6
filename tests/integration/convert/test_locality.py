"""Conversions of remote sources: each chunk is read once, through a cache, by a worker that is close to the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from benchmarks.bench_locality import rows

from penstock.storage.cache import CACHE_CHUNK_BYTES
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert import WorkerSettings
from penstock_convert.convert import convert
from penstock_convert.plan.placement import Placement, TaskAssignment

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

NBYTES = 64 * MIB


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("locality") / "source"
    write_llama(directory, total_bytes=NBYTES, shards=2)
    return directory


class Watched(Placement):
    """Checks every decision against the workers' reports of cached bytes. It begins once both workers exist."""

    last: Watched

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.holds, self.begun = dict[str, set[int]](), set[int]()
        Watched.last = self

    def join(self, worker: str, now: float, *, holds: Iterable[int] = (), at: str = "") -> None:
        self.holds[worker] = set(holds)
        super().join(worker, now, holds=self.holds[worker], at=at)

    def next(self, worker: str, now: float) -> TaskAssignment:
        given = super().next(worker, now) if len(self.holds) == 2 else TaskAssignment()
        for task in given.tasks:
            is_here = task in self.holds[worker] or not self.holds[worker] - self.begun
            assert is_here, f"{worker} runs {task}, and has the bytes of {self.holds[worker] - self.begun}"
            self.begun.add(task)
        return given


def test_only_uncached_bytes_are_read_from_source(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "120")  # for a chunk that another fetches, however busy the machine is
    monkeypatch.setattr("penstock_convert.coordinator.Placement", Watched)
    *one_host, hosts = rows(source, tmp_path, "4M")
    for row in one_host:
        assert row.served_bytes == row.fetched_bytes == row.missing_bytes, row
        assert row.fetched_bytes + row.held_bytes >= row.read_bytes, row
        was_once = not row.num_twice and not row.num_stolen
        assert not was_once or row.held_bytes < row.read_bytes - row.missing_bytes + CACHE_CHUNK_BYTES, row
    cold, half, whole = one_host
    assert 0 == whole.missing_bytes < half.missing_bytes < cold.missing_bytes
    first, second = Watched.last.holds.values()
    assert len(first) >= hosts.num_tasks // 3 and len(second) >= hosts.num_tasks // 3
    assert first | second == Watched.last.begun == set(range(hosts.num_tasks))
    assert (
        hosts.held_bytes and hosts.fetched_bytes < hosts.served_bytes
    )  # the coordinator, without a cache, read headers


def test_disabled_cache_reads_everything_from_source(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", devices="cpu", workers=WorkerSettings(num_workers=1, task_bytes="4M"))
    assert (report.fetched_bytes, report.held_bytes) == (report.read_bytes, 0)
