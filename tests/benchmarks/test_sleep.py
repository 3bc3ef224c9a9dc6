"""The benchmark of a sleep runs end to end at a few MB, and notices a changed value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_sleep_benchmark_reports_digest_and_copy_times() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_sleep", "--device", "cpu", "--total-gb", "0.004", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    assert row["tensors"] == 32 * 6 and row["digest_s"] > 0 and len(row["copy_s"]) == 2
