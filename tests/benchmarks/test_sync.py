"""The sync benchmark runs end to end at some MB, on the CPU, and measures every row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.bench_fetch import rates
from benchmarks.bench_sync import share_of
from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]


def test_unmeasured_rate_is_reported_as_not_measured() -> None:
    assert share_of(285.2, 392.0, "into each of 2") == "285 GB/s into each of 2 (73% of the limit)"
    assert share_of(0.277, 0.0, "into each of 1") == "0.28 GB/s into each of 1 (limit not measured)"
    assert rates([310.4, 310.2]) == "310.3 GB/s (310.2-310.4)"
    assert rates([0.012, 0.014]) == "0.013 GB/s (0.012-0.014)"
    assert rates([0.0, 0.0]) == rates([]) == "not measured"
    for page in (ROOT / "benchmarks" / "results").rglob("*.md"):
        assert "0.0 GB/s (0.0-0.0)" not in page.read_text(encoding="utf-8"), page


@long_running
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_results_page_contains_every_row(tmp_path: Path) -> None:
    # Two of each side take twice the time, of which most is imports.
    world_size = 4 if os.environ.get("DRILLS") == "all" else 2
    rows = "limits,llama,together,sleep,fp8,moe,host"  # the last part is a broadcast that moe measures too
    what = [
        "--small",
        "--total-gb",
        "0.008",
        "--world-size",
        str(world_size),
        "--reps",
        "1",
        "--rows",
        rows,
        "--budget-s",
        "250",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "benchmarks.bench_sync", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "sync.md").read_text(encoding="utf-8")
    assert "not measured" not in page, page + done.stderr[-2000:]
    for row in ("llama, live, direct", "llama, live, staged: pause", "llama, snapshot, staged", "moe, live, direct"):
        assert row in page
    for row in ("together, live, staged: pause", "together, snapshot, staged: a version"):
        assert row in page
    for row in ("direct with 50% ahead: pause", "GB of staging memory beside", "sleep, staged: restore"):
        assert row in page
    for row in ("fp8, live, direct: a version", "fp8: gloo broadcast, packed, then quantised", "quantised within"):
        assert row in page
    for row in ("gloo broadcast, packed", "gloo broadcast, per tensor", "pinned host memory", "the pull of it"):
        assert row in page
    samples = [json.loads(line) for line in (tmp_path / "sync.jsonl").read_text(encoding="utf-8").splitlines()]
    steady = [update for sample in samples for turn in sample.get("steady", ()) for update in turn["updated"]]
    assert steady
    assert all(update["nbytes"] > 0 for update in steady)
