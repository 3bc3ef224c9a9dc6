"""The load benchmark runs end to end at a few MB, and its page says that all bytes were equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

ROOT = Path(__file__).parents[2]

pytestmark = long_running


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("bench")
    sizes = ["--total-gb", "0.01", "--group-gb", "0.01", "--moe-tensors", "300", "--world-size", "2", "--reps", "2"]
    places = ["--shm-dir", str(at), "--disk-dir", str(at), "--out", str(at / "out")]
    what = ["--device", "cpu", "--rows", "a,c,e", "--loaders", "penstock,safetensors", "--also", "prototype"]
    command = [sys.executable, "-m", "benchmarks.load", *what, *sizes, *places, "--budget-s", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return at / "out"


def test_results_page_compares_rows_with_goals(ran: Path) -> None:
    page = (ran / "load.md").read_text(encoding="utf-8")
    assert "wrong bytes" not in page
    assert "failed" not in page
    assert page.count("equal to those of safetensors") == 3
    for name in ("penstock", "safetensors", "prototype"):
        assert page.count(f"| {name} | 2 |") == 3
    assert page.count("- goal ") == 2


def test_load_benchmark_records_every_measurement(ran: Path) -> None:
    head, *samples = map(json.loads, (ran / "load.jsonl").read_text(encoding="utf-8").splitlines())
    assert head["machine"]["versions"]
    assert not head["skipped"]
    cold = [sample for sample in samples if sample["row"] == "c" and "seconds" in sample]
    assert all(sample["resident"] == 0.0 or sample["file_system"] in {"tmpfs", "overlay"} for sample in cold)
    assert {sample["loader"] for sample in samples} >= {
        "penstock",
        "safetensors",
        "prototype",
        "limit:h2d",
        "limit:direct",
    }
