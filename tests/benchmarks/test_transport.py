"""The transport benchmark runs, small, and compares the bytes that crossed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_transport_benchmark_reports_every_segment_size(transport: str) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_transport", "--transport", transport]
    command += ["--mib", "1", "--reps", "1", "--threads", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["num_segments"] for row in rows] == [2, 2, 16, 256]
    assert all(row["gb_per_s"] > 0 for row in rows)
