"""`benchmarks/bench_adapters.py` on a small model: each way has its row, and the adapter is the smaller version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import Host
from tests.support.long_running import long_running

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft", minversion="0.21")

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_adapters.py"
SMALL = ("--hidden", "64", "--layers", "1", "--vocab", "256", "--repeat", "1")


@long_running
def test_adapter_benchmark_has_row_for_each_method(host: Host) -> None:
    done = subprocess.run([sys.executable, str(BENCH), *SMALL], env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, model, directory = (json.loads(line) for line in done.stdout.splitlines())
    assert model["version_bytes"] == directory["version_bytes"] < whole["version_bytes"]
    assert all(row["version_s"] >= row["training_waits_s"] > 0 for row in (whole, model, directory))
