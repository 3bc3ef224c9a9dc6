"""Conversions on a real Ray cluster. When one of two nodes dies midway, the files equal those of one local worker.

The command's stdout is only JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.jobs import convert_as
from tests.support.long_running import long_running

from penstock.testing.checkpoints import write_llama

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

# Each worker writes a mark, and the first waits for the others' marks, so every worker has begun when a node dies. The
# pause keeps it busy for seconds. On a loaded machine it finished before its node was gone.
MEETING = """
import os, time
from pathlib import Path

def meet(tensor, name):
    marks = Path(os.environ["MARKS"])
    (marks / str(os.getpid())).touch()
    deadline = time.monotonic() + 120
    while len(list(marks.iterdir())) < int(os.environ["WORKERS"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.03)
    return tensor

meet.rows = True
meet.raw = True
"""
TOLD = {
    "operations": [{"op": "function", "function": "meeting:meet"}],
    "to": "cast:F32",
    "task_bytes": "256K",
    "devices": "cpu",
}
PROGRAM = """
import json, os, sys
from ray.cluster_utils import Cluster
from penstock_convert.convert import WorkerSettings, convert

source, into, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()


def said(done, total):
    if len(nodes) == 2 and len(os.listdir(os.environ["MARKS"])) == 2:
        cluster.remove_node(nodes.pop(), allow_graceful=False)


workers = WorkerSettings(num_workers=2, ray=cluster.address, task_bytes=told.pop("task_bytes"))
report = convert(source, into, workers=workers, progress=said, **told)
print(json.dumps({"tasks": report.num_tasks, "ends": [one.end for one in report.workers], "left": len(nodes)}))
cluster.shutdown()
"""
COMMAND = """
import json, os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.wait_for_nodes()
command = [sys.executable, "-m", "penstock.cli.main", "convert", *sys.argv[1:], "--ray", cluster.address]
environ = {**os.environ, "RAY_LOG_TO_STDERR": "1"}  # of this process alone: Ray's C++ logs to stdout then
done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)
print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
cluster.shutdown()
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Keep Ray's files in a directory whose name is short enough for sockets. Workers meet in another."""
    (tmp_path / "meeting.py").write_text(MEETING)
    (tmp_path / "alone").mkdir()
    (tmp_path / "both").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MARKS", str(tmp_path / "alone"))
    monkeypatch.setenv("WORKERS", "1")
    both = {"MARKS": str(tmp_path / "both"), "WORKERS": "2"}
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        ray = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        yield {**os.environ, **both, **ray}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_only_tasks_of_dead_ray_node_are_repeated(tmp_path: Path, environ: dict[str, str]) -> None:
    write_llama(tmp_path / "source", total_bytes=24_000_000)
    convert_as(tmp_path / "source", tmp_path / "expected", workers=1, **TOLD)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "source"), str(tmp_path / "out"), json.dumps(TOLD)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["left"] == 1
    assert any(end != "finished" for end in said["ends"])
    assert files(tmp_path / "out") == files(tmp_path / "expected")


@long_running
def test_ray_log_lines_stay_out_of_json(tmp_path: Path, environ: dict[str, str]) -> None:
    write_llama(tmp_path / "source", total_bytes=2_000_000)
    words = ["--to", "cast:F32", "--workers", "1", "--devices", "cpu", "--format", "json"]
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "source"), str(tmp_path / "out"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    code, stdout, stderr = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, stderr[-4000:]
    assert "Ray cluster" in stderr and "core_worker" in stderr, "Ray logs what it does"
    report = json.loads(stdout)
    assert report["num_tasks"] and report["workers"]
