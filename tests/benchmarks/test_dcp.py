"""`benchmarks/bench_dcp.py` on a small checkpoint: every tool of its rows reads and writes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.long_running import long_running

ROOT = Path(__file__).resolve().parent.parent.parent


@long_running
def test_dcp_benchmark_reports_torch_and_penstock_rows() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_dcp", "--mib", "2", "--ranks", "1", "--runs", "1"]
    done = subprocess.run(
        [*command, "--saved-by", "1", "--rows", "warm$|^save"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tools = {(row["row"], row["tool"]) for row in rows}
    for row in ("Hugging Face, warm", "DCP's format, warm", "save later"):
        assert {(row, "torch"), (row, "penstock")} <= tools
    assert ("save", "penstock") in tools and all(row["median_s"] >= 0 for row in rows)
