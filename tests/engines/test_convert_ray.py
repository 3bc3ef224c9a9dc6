"""A conversion on a real Ray cluster of two nodes, one of which dies in the middle: the files of one local worker."""

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

from penstock.jobs.convert import convert
from penstock.testing.checkpoints import write_llama

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

TOLD = {
    "operations": [{"op": "function", "function": "penstock.testing.jobs:slowly"}],
    "to": "cast:F32",
    "task_bytes": "256K",
    "devices": "cpu",
}
PROGRAM = """
import json, sys
from ray.cluster_utils import Cluster
from penstock.jobs.convert import convert

source, into, told, dies = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "dies"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()


def said(done, total):
    if dies and len(nodes) == 2 and done >= total // 3:
        cluster.remove_node(nodes.pop(), allow_graceful=False)


report = convert(source, into, workers=2, ray=cluster.address, on_progress=said, **told)
worked = [one.num_tasks for one in report.workers if one.num_tasks]
print(json.dumps({"worked": worked, "ends": [one.end for one in report.workers], "left": len(nodes)}))
cluster.shutdown()
"""


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Ray's files in a directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        yield {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("fate", ["lives", "dies"])
def test_two_nodes(fate: str, tmp_path: Path, environ: dict[str, str]) -> None:
    write_llama(tmp_path / "source", total_bytes=24_000_000)
    convert(tmp_path / "source", tmp_path / "expected", workers=1, **TOLD)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "source"), str(tmp_path / "out"), json.dumps(TOLD), fate]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["worked"]) >= 2, "both nodes worked"
    if fate == "dies":
        assert said["left"] == 1
        assert any(end != "finished" for end in said["ends"])
    assert files(tmp_path / "out") == files(tmp_path / "expected")
