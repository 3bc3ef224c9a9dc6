"""The fetch benchmarks run end to end at some MB, on the CPU, and measure every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]


@long_running
def test_fetch_benchmark_prints_receivers_and_limit() -> None:
    what = ["--total-gb", "0.02", "--receivers", "2", "--repeat", "2", "--format", "json"]
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "fetch", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *receivers, limit = json.loads(done.stdout)
    assert [row["who"] for row in receivers] == ["receiver 0", "receiver 1"]
    assert all(row["path"].startswith("shm <- ") and row["gb_per_s"] > 0 for row in receivers)
    assert limit["who"] == "limit"


def test_invalid_device_is_refused_before_start() -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "fetch", "--device", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "'gpu' is not a valid device" in done.stderr


@long_running
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_results_page_contains_every_row(tmp_path: Path) -> None:
    what = ["--small", "--total-gb", "0.02", "--disk-gb", "0.01", "--world-size", "2", "--reps", "1"]
    places = ["--files-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--budget-s", "250"]
    command = [sys.executable, "-m", "benchmarks.bench_fetch", *what, *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "out" / "fetch.md").read_text(encoding="utf-8")
    assert "not measured" not in page, page + done.stderr[-2000:]
    for row in ("payload", "committed", "decoding", "gloo broadcast", "engine restart", "split read", "storage bytes"):
        assert row in page
    assert "| ... storage bytes read | 1.0x | 1.000x |" in page
    samples = [json.loads(line) for line in (tmp_path / "out" / "fetch.jsonl").read_text(encoding="utf-8").splitlines()]
    fetched = [one for sample in samples if sample["asked"] == "fetch" for one in sample["said"]]
    assert fetched
    # Who read storage without a manifest had nothing to compare with, and says so.
    assert all(one["verified"] for one in fetched if not one.get("storage_bytes"))
    assert any(one["verified"] for one in fetched)
