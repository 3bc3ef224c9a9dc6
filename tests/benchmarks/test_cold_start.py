"""The benchmark of cold starts runs end to end at some MB, and finds that storage was read once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_cold_start_page_states_that_storage_is_read_once(tmp_path: Path) -> None:
    what = ["--workers", "2", "--mb", "32", "--mb-per-s", "0", "--reps", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.bench_cold_start", *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in (tmp_path / "cold-start.md").read_text(encoding="utf-8").splitlines() if "unthr" in line]
    assert len(rows) == 1
    storage_read = rows[0].split("|")[4].split("-")[0]
    assert 1.0 <= float(storage_read) < 1.02
