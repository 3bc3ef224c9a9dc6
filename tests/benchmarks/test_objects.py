"""The object benchmark runs, small, and compares the bytes its clients read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_object_store_benchmark_reports_every_client(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_objects",
        "--servers",
        "rangeserver",
        "--mib",
        "16",
        "--reps",
        "1",
    ]
    command += [
        "--clients",
        "plain,penstock,penstock-cached,obstore",
        "--threads",
        "2",
        "--json",
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["client"] for row in rows} >= {"plain", "penstock", "penstock-cached (cold)", "penstock-cached (warm)"}
    assert all(row["gb_per_s"] > 0 for row in rows)
