"""The planner's benchmark runs, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("more", [[], ["--whole-experts", "--scale", "2"]])
def test_plan_benchmark_reports_sync_plan(more: list[str]) -> None:
    small = ["--layers", "3", "--experts", "32", "--trainers", "16", "--receivers", "8", "--shards", "8"]
    command = [sys.executable, "-m", "benchmarks.bench_plan", *small, "--rounds", "1", "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tensors"] == 3 + 3 * 12 + 2 * 2 + 2 * 32 * 3
    assert told["segments"] >= told["most_segments_of_a_receiver"] > 0
    assert 0 < told["plan_s"] < 60 and 1 <= told["most_given_over_mean"] < 2


@pytest.mark.parametrize("op", ["linear", "fp8-block128"])
def test_task_benchmark_prediction_is_at_least_lower_bound(op: str) -> None:
    small = ["--layers", "2", "--experts", "4", "--tasks", "500", "--workers", "16", "--op", op]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_tasks", *small], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["workers"] == 16 and 250 < told["tasks"] < 1000
    assert told["predicted_s"] >= told["limit_s"] > 0


def test_benchmark_measures_first_version_time_per_rank() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_first_version", "--small", "--runs", "1", "--prepare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heads = [line.split(" | ")[0] for line in done.stdout.splitlines()]
    assert heads[1:] == ["trainer 0", "trainer 1", "engine 0", "engine 1", "all", "wall"]


def test_plan_benchmark_measures_loader_recording() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_record", "--small", "--runs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # 4 layers of 25 experts of 3 tensors; an engine of two holds 12 of the experts.
    assert done.stdout.startswith("300 tensors, 144 rows: ")
