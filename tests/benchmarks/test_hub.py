"""The hub's benchmark runs, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
ROOT = Path(__file__).parents[2]


def test_hub_benchmark_reports_every_operation() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_hub", "--members", "12", "--chunks", "40", "--seconds", "1.5"]
    done = subprocess.run(
        [*command, "--spread-s", "0.2", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["phase"] for row in rows} == {"beats", "cold start", "one instant", "full"}
    assert {row["question"] for row in rows} == {"beat", "claim", "flight", "all"}
    assert all(row["count"] > 0 and row["p99_ms"] > 0 for row in rows)
