"""Conversions of what is far away: each chunk is read once, through a cache, by whoever has the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.bench_locality import rows

from penstock.jobs.convert import convert
from penstock.storage.cache import CACHE_CHUNK_BYTES
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

NBYTES = 64 * MIB


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("locality") / "source"
    write_llama(directory, total_bytes=NBYTES, shards=2)
    return directory


def test_only_what_no_cache_has_is_read_from_the_source(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(
        "PENSTOCK_STALL_S", "120"
    )  # a chunk that another fetches is waited for however busy the machine is
    cold, half, whole, hosts = rows(source, tmp_path, "4M")
    for row in (cold, half, whole):
        assert row.served_bytes == row.fetched_bytes == row.missing_bytes, row
        assert row.fetched_bytes + row.held_bytes >= row.read_bytes, row
        assert (
            row.num_twice or row.num_stolen or row.held_bytes < row.read_bytes - row.missing_bytes + CACHE_CHUNK_BYTES
        ), row
    assert 0 == whole.missing_bytes < half.missing_bytes < cold.missing_bytes
    # Each host opened the other's file too, whose first chunk has the header; beyond that, tasks taken from the other.
    # (The header is read once more, by the coordinator, which has no cache.)
    taken = hosts.num_stolen + hosts.num_twice
    assert hosts.fetched_bytes <= 2 * (1 + taken) * CACHE_CHUNK_BYTES, hosts
    assert taken > 6 or hosts.fetched_bytes < NBYTES // 2, hosts


def test_without_a_cache_everything_comes_from_the_source(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", devices="cpu", workers=1, task_bytes="4M")
    assert (report.fetched_bytes, report.held_bytes) == (report.read_bytes, 0)
