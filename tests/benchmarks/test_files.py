"""The file benchmark runs end to end at a few MB, and its page names every case, its rate and the limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]


def run_benchmark(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.bench_files", "--total-gb", "0.004", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@long_running
def test_file_benchmark_reports_cached_and_cold_reads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = run_benchmark("--reps", "1", "--cases", "mapped,safetensors", "--dir", str(tmp_path))
    for case in ("mapped", "safetensors"):
        assert found.count(f"| {case} | 1 |") == 2, found
    assert "failed" not in found


def test_source_reads_are_compared_with_plain_system_calls(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = run_benchmark("--source", "--dir", str(tmp_path))
    assert "one call of 4 KiB" in found
    assert found.count("GB/s") == 8
