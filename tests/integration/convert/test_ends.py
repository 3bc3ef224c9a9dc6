"""Ends of a conversion: its input changes on a server, or its process is killed after publishing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fork_server import ForkServer
from tests.support.jobs import convert_as
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.errors import ConfigError, SourceChanged
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert.convert import WorkerSettings
from penstock_convert.workers import launch as launcher_module
from penstock_convert.workers.launch import LocalLauncher

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "workers": 1, "task_bytes": "256K", "shard_bytes": 2_000_000}


def test_changed_object_fails_conversion(tmp_path: Path) -> None:
    write_llama(tmp_path / "made", total_bytes=8 * MIB, shards=1)
    raw = (tmp_path / "made" / "model.safetensors").read_bytes()
    (tmp_path / "place").mkdir()
    with RangeServer({"model.safetensors": raw}) as server:

        def change(done: int, total: int) -> None:
            if done == 3:
                server.replace("model.safetensors", raw[:-8] + b"modified")

        with pytest.raises(SourceChanged) as caught:
            convert_as(f"{server.url}/model.safetensors", tmp_path / "place" / "out", progress=change, **TOLD)
    assert not caught.value.mutated
    assert list((tmp_path / "place").iterdir()) == []


KILLED = """
import os, signal, sys
from penstock_convert.workers import launch as launcher_module
from penstock_convert.convert import WorkerSettings, convert
from penstock_convert.workers.launch import LocalLauncher
from penstock_convert.result import Journal
Journal.remove = lambda self: os.kill(os.getpid(), signal.SIGKILL)
workers = WorkerSettings(num_workers=1, task_bytes="256K")
convert(sys.argv[1], sys.argv[2], devices="cpu", workers=workers, shard_bytes=2_000_000)
"""


def test_job_killed_after_publishing_is_complete(small_checkpoint: Path, tmp_path: Path) -> None:
    into = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(small_checkpoint), str(into)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in into.iterdir()}
    assert len(list(tmp_path.iterdir())) == 2, "its journal is beside it still"
    report = convert_as(small_checkpoint, into, **TOLD)
    assert report.num_resumed == report.num_tasks and report.read_bytes == 0
    assert report.revision == penstock.verify(into).revision
    assert {path.name: path.stat().st_mtime_ns for path in into.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_job_killed_while_publishing_resumes(fork_server: ForkServer, tmp_path: Path) -> None:
    """Kill the process before each change to the file system, from the last task's end to the coordinator's own end."""
    write_llama(tmp_path / "made", total_bytes=2 * MIB, shards=2)
    told = {"sources": str(tmp_path / "made"), "devices": "cpu", "workers": 1, "shard_bytes": 1_000_000}
    into = tmp_path / "expected" / "out"
    convert_as(destination=into, **told)
    expected = {path.name: path.read_bytes() for path in into.iterdir()}
    assert penstock.verify(into).verified

    def ends(function: str, values: dict[str, Any]) -> str:
        with fork_server.fork(f"tests.support.jobs:{function}", values) as process:
            said = [json.loads(line) for line in process.stdout]
            process.wait(60)
        return str(said[-1]["event"] if said else "")

    def killed_at(step: int) -> bool:
        place = tmp_path / f"step{step}"
        values = told | {"destination": str(place / "out")}
        if ends("coordinate_until", values | {"step": step}) == "converted":
            return False
        for _ in range(2):  # what was cut off, and once more what is done
            assert ends("coordinate", values) == "converted", f"step {step}"
            assert {path.name: path.read_bytes() for path in (place / "out").iterdir()} == expected
            assert [path.name for path in place.iterdir()] == ["out"]
        return True

    with ThreadPoolExecutor(4) as pool:
        killed = list(pool.map(killed_at, range(1, 41)))
    assert sum(killed) > 12 and killed == sorted(killed, reverse=True), "each step once, then none is left"


def test_repeated_conversion_is_skipped(small_checkpoint: Path, tmp_path: Path) -> None:
    into = tmp_path / "out"
    first = convert_as(small_checkpoint, into, **TOLD)
    before = {path.name: path.stat().st_mtime_ns for path in into.iterdir()}
    again = convert_as(small_checkpoint, into, **TOLD)
    assert again.revision == first.revision and again.num_resumed == again.num_tasks and again.read_bytes == 0
    assert {path.name: path.stat().st_mtime_ns for path in into.iterdir()} == before
    for changed in ({"to": "cast:F32"}, {"operations": [{"op": "rename", "rules": [["norm", "other"]]}]}):
        with pytest.raises(ConfigError, match="already"):
            convert_as(small_checkpoint, into, **TOLD, **changed)
    shard = next(into.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="already"):
        convert_as(small_checkpoint, into, **TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


SLOWLY: dict[str, Any] = {
    "operations": [{"op": "function", "function": "tests.support.jobs:slowly"}],
    "devices": "cpu",
    "task_bytes": "128K",
}
NUM_SEEDS = 40 if os.environ.get("DRILLS") == "all" else 5


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_job_completes_after_fork_server_dies(seed: int, small_checkpoint: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    left = rng.choice([1, 2, 3])
    is_over = threading.Event()
    with LocalLauncher("cpu", 2) as launcher:

        def kill_some() -> None:
            for _ in range(left):
                if is_over.wait(rng.random() * 0.8):
                    return
                if (server := launcher.fork_server) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(server.pid, signal.SIGKILL)

        launcher.begin()
        killer = threading.Thread(target=kill_some)
        killer.start()
        try:
            workers = WorkerSettings(num_workers=2, launcher=launcher)
            convert_as(small_checkpoint, tmp_path / "out", workers=workers, **SLOWLY)
        finally:
            is_over.set()
            killer.join()
    assert penstock.verify(tmp_path / "out").verified
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_lost_fork_server_is_restarted(small_checkpoint: Path, tmp_path: Path) -> None:
    """Kill it before each of the first requests that it receives. The requester has seen it alive."""
    with LocalLauncher("cpu", 2) as launcher:
        launcher.begin()
        seen = list[int]()

        class Killed(type(launcher.fork_server)):  # type: ignore[misc]
            def fork(self, *given: Any) -> Any:
                if len(seen) < 3:
                    seen.append(self.pid)
                    os.kill(self.pid, signal.SIGKILL)
                return super().fork(*given)

        make = launcher_module.ForkServer.start
        with pytest.MonkeyPatch.context() as patch:

            def started(imports: Any) -> Any:
                found = make(imports)
                found.__class__ = Killed
                return found

            patch.setattr(launcher_module, "ForkServer", SimpleNamespace(start=started))
            launcher.close()
            workers = WorkerSettings(num_workers=2, launcher=launcher)
            convert_as(small_checkpoint, tmp_path / "out", workers=workers, **SLOWLY)
    assert len(set(seen)) == 3
    assert penstock.verify(tmp_path / "out").verified
