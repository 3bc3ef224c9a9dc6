"""The benchmark of conversions runs, small; a row that fails leaves the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden", "512", "--source-bytes", "20M", "--reps", "1", "--memory", "64M"]


def rows(home: Path, *more: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, "-m", "benchmarks.bench_convert", *SMALL, "--home", str(home / "home"), *more]
    done = subprocess.run([*command, "--out", str(home)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (home / "convert.jsonl").exists(), done.stderr
    assert not (home / "home").exists()
    return done.returncode, [json.loads(line) for line in (home / "convert.jsonl").read_text().splitlines()]


@long_running
def test_convert_benchmark_reports_every_case(tmp_path: Path) -> None:
    code, found = rows(tmp_path, "--only", "fp8", "--script-bytes", "17M")
    assert code == 0
    assert [row["case"] for row in found] == ["penstock", "torch script"]
    assert all(row["num"] == 1 and row["seconds"] > 0 and row["peak_mb"] > 0 for row in found)
    assert found[0]["of_limit"] > 0


@long_running
def test_failed_benchmark_row_does_not_discard_other_rows(tmp_path: Path) -> None:
    code, found = rows(tmp_path, "--only", "merge", "--mergekit", "/bin/false")
    assert code == 1
    assert [row["case"] for row in found] == ["penstock", "mergekit", "torch script"]
    assert ["failed" in row for row in found] == [False, True, False]


@long_running
def test_rows_beyond_time_budget_are_skipped(tmp_path: Path) -> None:
    code, found = rows(tmp_path, "--budget-s", "1")
    assert code == 1
    assert len(found) == 4 and all("no time left" in str(row["failed"]) for row in found)
