"""The safetensors benchmark runs end to end at a few MB, and has every row with both kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running
from tests.support.servers.network_volume import refusal

ROOT = Path(__file__).parents[2]


@long_running
def test_benchmark_has_row_per_file_and_location(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    small = ["--mib", "16", "--tensors", "200", "--runs", "1", "--latency-ms", "0", "--mb-per-s", "0"]
    command = [sys.executable, "-m", "benchmarks.bench_safetensors", *small, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "safetensors.jsonl").read_text().splitlines()]
    places = ["local, cached", "local, cold", "http", *([] if refusal() else ["network volume"])]
    names = [f"{file}, {call}" for file in ("checkpoint", "small") for call in ("load_file", "each_tensor")]
    measured = [row for row in rows if "penstock" in row]
    expected = [f"{name}, {place}" for name in names for place in places] + ["1000 files of one tensor, local, cached"]
    assert sorted(row["row"] for row in measured) == sorted(expected)
    assert all(row["penstock"]["median_s"] > 0 and row["stock"]["median_s"] > 0 for row in measured)
