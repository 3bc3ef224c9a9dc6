"""The benchmark of slowed and killed workers runs, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]


@long_running
@pytest.mark.timeout(400)
def test_straggler_benchmark_reports_every_case() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_stragglers", "--repeats", "1", "--num-tasks", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["worker"] for row in rows] == ["well", "slowed", "killed"]
    assert all(row["tasks"] > 30 and row["rate"] > 0 for row in rows)
