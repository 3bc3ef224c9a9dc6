"""The benchmark of memory tiers runs end to end at a few MB, and its page has every link and the fresh load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]


def run_benchmark(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.bench_tiers", "--total-gb", "0.004", "--reps", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_each_link_row_includes_its_limit(tmp_path: Path) -> None:
    found = run_benchmark("--dir", str(tmp_path))
    for what in ("host -> disk, first", "disk -> host", "host -> disk", "fresh load"):
        assert f"| {what} |" in found, found
    assert not list(tmp_path.iterdir())


@long_running
def test_tier_benchmark_measures_attach_with_swapping(tmp_path: Path) -> None:
    found = run_benchmark("--keeper", "--dir", str(tmp_path))
    assert "attach, swapped back | 2 |" in found, found
    assert "fresh load | 1 |" in found, found
