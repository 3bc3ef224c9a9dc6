"""The benchmark of hosts runs, where a link can be shaped, and compares what arrived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def can_shape() -> bool:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"penstock-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=30).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
    return made


@pytest.mark.skipif(not can_shape(), reason="network namespaces need root, ip and tc")
def test_host_benchmark_reports_positive_rates() -> None:
    words = [
        sys.executable,
        "-m",
        "benchmarks.bench_hosts",
        "--cases",
        "socket,http",
        "--mb",
        "1",
        "--reps",
        "1",
        "--json",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {"socket", "http"}
    assert all(row["gb_per_s"] > 0 for row in rows.values())
