"""`benchmarks/bench_doors.py` on a small model: each way loads the same bytes, and absent libraries are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.door_worker import DOORS, Job
from tests.support.long_running import long_running
from tests.support.servers.network_volume import refusal

from benchmarks import door_worker
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

ROOT = Path(__file__).parents[2]
IN_PROCESS = ["load", "from_pretrained of penstock_hf", "penstock.safe_open", "Run:ai's names", "DCP, safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("door", IN_PROCESS)
def test_both_ways_load_equal_bytes(door: str, tmp_path: Path) -> None:
    files = [str(path) for path in write_llama(tmp_path / "model", total_bytes=MIB, fp8=False)]
    ways = [next(iter(DOORS[door].ways)), "penstock"]
    jobs = [Job(door, way, str(tmp_path / "model"), files, "cpu") for way in ways]
    stock, ours = map(door_worker.measure, jobs)
    assert stock["sum"] == ours["sum"] != 0
    assert all(answer[key] > 0 for answer in (stock, ours) for key in ("call_s", "again_s", "peak_bytes"))
    read = door_worker.limit(jobs[0])
    assert read["nbytes"] == sum(map(len, map(Path.read_bytes, map(Path, files)))) and read["call_s"] > 0


@long_running
def test_page_has_row_for_each_way(tmp_path: Path) -> None:
    small = ["--gib", "0.01", "--runs", "1", "--states", "kept", "new", "--directory", str(tmp_path)]
    doors = ["--doors", "^load|^fetch|attach|run|vLLM|SGLang", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks.bench_doors", *small, *doors]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "doors.jsonl").read_text().splitlines()]
    measured = {(row["door"], row["state"]): row["ways"] for row in rows}
    for state in ("kept", "new"):
        for door in ("load", "load, verified", "fetch", "cache.attach", "load_file under penstock run"):
            assert measured[door, state]["penstock"]["total"][0] > 0
    page = (tmp_path / "out" / "doors.md").read_text()
    assert page == done.stdout.removesuffix("\n")
    assert all(f"| {row['door']} | {row['state']} | " in page for row in rows)


@long_running
def test_network_states_have_row_for_each_way(tmp_path: Path) -> None:
    small = ["--gib", "0.01", "--runs", "1", "--states", "kept", "volume", "http", "--latency-ms", "0"]
    places = ["--directory", str(tmp_path), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks.bench_doors", *small, *places, "--doors", "^load$|^safe_open"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "doors.jsonl").read_text().splitlines()]
    measured = {(row["door"], row["state"]): row["ways"].keys() for row in rows}
    for state in ("http", *([] if refusal() else ["volume"])):
        assert measured["load", state] >= {"load_file", "penstock"}
        assert measured["safe_open after install()", state] == {"stock", "penstock"}
    assert measured["safe_open of 1,000 files after install()", "kept"] == {"stock", "penstock"}
