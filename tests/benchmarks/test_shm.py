"""The benchmark of host memory runs whole processes, and every fetch is verified and uses shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@long_running
@pytest.mark.timeout(200)
def test_host_memory_benchmark_fetches_through_shm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_shm", "--gb", "0.01", "--reps", "1", "--json"]
    command += ["--pages", "kept", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for case in ("fetch", "fetch into"):
        (fetched,) = found[case]
        assert fetched["verified"]
        assert [path.partition(" ")[0] for path in fetched["paths"]] == ["shm"]
    assert all(turns[0]["seconds"] > 0 for turns in found.values())
