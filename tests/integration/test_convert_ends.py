"""How a conversion ends when its input changes on a server, or its process is killed once all is published."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, SourceChanged
from penstock.jobs.convert import convert
from penstock.testing.checkpoints import write_llama
from penstock.testing.http_server import RangeServer
from penstock.types import MIB

pytestmark = pytest.mark.usefixtures("crew_zygotes")

TOLD: dict[str, Any] = {"devices": "cpu", "workers": 1, "task_bytes": "256K", "shard_bytes": 2_000_000}


def test_an_object_that_changes_meanwhile_ends_it(tmp_path: Path) -> None:
    write_llama(tmp_path / "made", total_bytes=8 * MIB, shards=1)
    raw = (tmp_path / "made" / "model.safetensors").read_bytes()
    (tmp_path / "place").mkdir()
    with RangeServer({"model.safetensors": raw}) as server:

        def change(done: int, total: int) -> None:
            if done == 3:
                server.replace("model.safetensors", raw[:-8] + b"modified")

        with pytest.raises(SourceChanged) as caught:
            convert(f"{server.url}/model.safetensors", tmp_path / "place" / "out", on_progress=change, **TOLD)
    assert not caught.value.mutated
    assert list((tmp_path / "place").iterdir()) == []


KILLED = """
import os, signal, sys
from penstock.jobs.convert import convert
from penstock.jobs.journal import Journal
Journal.remove = lambda self: os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], devices="cpu", workers=1, task_bytes="256K", shard_bytes=2_000_000)
"""


def test_one_that_was_killed_once_all_was_published_is_reported_as_done(made: Path, tmp_path: Path) -> None:
    into = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(made), str(into)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in into.iterdir()}
    assert len(list(tmp_path.iterdir())) == 2, "its journal is beside it still"
    report = convert(made, into, **TOLD)
    assert report.num_resumed == report.num_tasks and report.read_bytes == 0
    assert report.revision == penstock.verify(into).revision
    assert {path.name: path.stat().st_mtime_ns for path in into.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="already"):
        convert(made, into, **TOLD)
