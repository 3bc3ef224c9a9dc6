"""Conversions with misbehaving user functions, full disks, stores that fail, and concurrent conversions."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from tests.support.fork_server import ForkServer
from tests.support.jobs import convert_as
from tests.support.long_running import long_running
from tests.support.servers.s3 import SwiftServer, Unavailable
from tests.support.tensor_file import write_file

import penstock
import penstock_convert
from penstock.errors import DestinationError, DiskFull, OperationFailed, PeerLost, SourceError
from penstock.lifecycle import Closeable
from penstock.types import DType
from penstock_convert.convert import WorkerSettings
from penstock_convert.job import ConversionJob
from penstock_convert.messages import Began, JobSpec, Ready, TaskDone, TaskWork, Wire, WorkerHello
from penstock_convert.request import plan
from penstock_convert.workers.launch import LocalLauncher
from penstock_convert.workers.process import connect

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "task_bytes": "256K", "shard_bytes": 2_000_000}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def expected(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    into = tmp_path_factory.mktemp("expected") / "out"
    assert convert_as(small_checkpoint, into, workers=1, **TOLD).num_tasks > 40
    return files(into)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", "raised ValueError: on purpose"),
        ("exits", "raised SystemExit"),
        ("hangs", "3 workers were lost while tests.support.jobs:hangs ran on one task: it made no progress"),
        ("dies", "3 workers were lost while tests.support.jobs:dies ran on one task: it ended with -9"),
        ("leaks", "raised "),
        ("of_another_shape", ", not "),
        ("of_another_dtype", ", not "),
        ("no_tensor", "returned NoneType, not "),
    ],
)
def test_error_names_failing_user_function(
    function: str, says: str, fork_server: ForkServer, small_checkpoint: Path, tmp_path: Path
) -> None:
    word = {"op": "function", "function": f"tests.support.jobs:{function}"}
    values = {
        "sources": str(small_checkpoint),
        "destination": str(tmp_path / "out"),
        "operations": [word],
        "workers": 2,
        **TOLD,
    }
    stall = {"PENSTOCK_STALL_S": "3" if function == "hangs" else "60"}
    with fork_server.fork("tests.support.jobs:coordinate", values, stall) as process:
        assert select.select([process.stdout], [], [], 60.0)[0]
        said = [json.loads(line) for line in process.stdout]
        assert process.wait() == 1
    assert said[-1]["kind"] == "OperationFailed", said[-1]
    assert says in said[-1]["message"] and "tensor" in said[-1]["message"], said[-1]
    assert not (tmp_path / "out").exists()
    workers = [one["pid"] for one in said if one["event"] == "spawned"]
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_user_function_traceback_is_shown(
    small_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    word = {"op": "function", "function": "tests.support.jobs:raises"}
    with pytest.raises(OperationFailed):
        convert_as(small_checkpoint, tmp_path / "out", operations=[word], workers=1, **TOLD)
    said = capfd.readouterr().err
    assert ", in raises\n" in said and said.count("ValueError: on purpose") == 1


def test_user_function_output_goes_to_stderr(
    small_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [{"op": "function", "function": "tests.support.jobs:says"}]
    convert_as(small_checkpoint, tmp_path / "out", operations=words, workers=2, **TOLD)
    seen = {
        recipe.outputs[0].spec.name for recipe in plan(small_checkpoint, operations=words).recipes if not recipe.copies
    }
    said = capfd.readouterr()
    assert seen == {line.removeprefix("saw ") for line in said.err.splitlines() if line.startswith("saw ")}
    assert not said.out


class Visited(LocalLauncher):
    """A launcher whose coordinator receives a connection from a process that is not a worker."""

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        self.guest = connect(address, timeout_s=5.0)
        self.guest.send(WorkerHello(worker=worker, secret="gu\u00e9ss", device=device))
        super().spawn(worker, device, address, secret)


def test_connection_with_wrong_secret_is_rejected(small_checkpoint: Path, tmp_path: Path) -> None:
    with Visited() as launcher:
        convert_as(small_checkpoint, tmp_path / "out", workers=WorkerSettings(num_workers=1, launcher=launcher), **TOLD)
        with pytest.raises(PeerLost):
            launcher.guest.to_worker()
        launcher.guest.close()


NAMED = """
def run(tensor, name):
    return tensor

run.names = "^a"
"""


class Lost(Closeable):
    """A launcher whose workers start the operation on one task, copy another one, and are lost."""

    listen = None

    def __init__(self, job: ConversionJob) -> None:
        self.job, self.wires, self.threads = job, list[Wire](), dict[str, threading.Thread]()

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Start a worker as a thread that speaks the protocol."""
        wire = connect(address, timeout_s=5.0)
        self.wires.append(wire)
        wire.send(WorkerHello(worker=worker, secret=secret, device=device))
        self.threads[worker] = threading.Thread(target=self._work, args=(wire,), daemon=True)
        self.threads[worker].start()

    def _work(self, wire: Wire) -> None:
        tasks = list[int]()
        while not tasks:
            for message in wire.to_worker():
                if isinstance(message, JobSpec):
                    wire.send(Ready(key=self.job.key))
                elif isinstance(message, TaskWork):
                    tasks += message.tasks
        copies = [task for task in tasks if self.is_copy(task)]
        (made,) = set(tasks) - set(copies)
        wire.send(Began(task=made))
        wire.send(Began(task=copies[0]))
        wire.send(TaskDone(task=copies[0], digests=bytes(8 * self.job.num_pieces(copies[0]))))
        wire.shut_down()

    def is_copy(self, task: int) -> bool:
        """Return whether the operation does not run on a task."""
        return all(self.job.recipes[index].copies for index, _, _ in self.job.tasks.entries(task))

    def ended(self, worker: str) -> str | None:
        """Return how a worker ended."""
        return None if self.threads[worker].is_alive() else "it was lost"

    def kill(self, worker: str) -> None:
        """Do nothing, because the worker ends itself."""

    def close(self) -> None:
        """Close the connections."""
        for wire in self.wires:
            wire.close()


def test_worker_crash_error_names_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    monkeypatch.syspath_prepend(tmp_path)
    write_file(tmp_path / "one.safetensors", {name: (DType.F32, (1 << 16,), bytes(1 << 18)) for name in "abcdefgh"})
    told: dict[str, Any] = {"operations": [{"op": "function", "function": "named:run"}], "task_bytes": 1 << 19}
    job = plan(tmp_path / "one.safetensors", **told)
    with Lost(job) as launcher, pytest.raises(OperationFailed, match=r"3 workers were lost .* 'a'"):
        workers = WorkerSettings(num_workers=1, launcher=launcher)
        convert_as(tmp_path / "one.safetensors", tmp_path / "out", devices="cpu", workers=workers, **told)
    assert len(launcher.wires) == 3


FIRST = """
import os
import time
from pathlib import Path

def waits(tensor, name):
    try:
        open(os.environ["MARKS"] + "/begun", "x").close()
    except FileExistsError:
        return tensor
    while not Path(os.environ["MARKS"], "over").exists():
        time.sleep(0.01)
    return tensor + 1
"""


def test_task_returning_different_bytes_twice_fails_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.py").write_text(FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MARKS", str(tmp_path))
    write_file(tmp_path / "one.safetensors", {"a": (DType.F32, (256,), bytes(1024))})
    word = {"op": "function", "function": "first:waits"}

    def overwrite(done: int, total: int) -> None:
        """Write different bytes. The slower worker does too, unless the end of the job stops it before."""
        (growing,) = tmp_path.glob(".out.penstock-*/*.safetensors")
        with open(growing, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        (tmp_path / "over").touch()

    told: dict[str, Any] = {"operations": [word], "devices": "cpu", "workers": 2}
    with pytest.raises(OperationFailed, match="ran on the same task again"):
        convert_as(tmp_path / "one.safetensors", tmp_path / "out", progress=overwrite, **told)
    assert not (tmp_path / "out").exists()
    report = convert_as(tmp_path / "one.safetensors", tmp_path / "out", **told)
    assert (report.num_tasks, report.num_resumed) == (1, 0)
    assert penstock.verify(tmp_path / "out").verified


def test_too_small_disk_is_reported_before_reading(small_checkpoint, small_disk) -> None:
    disk = small_disk(4 << 20)
    with pytest.raises(DiskFull) as caught:
        convert_as(small_checkpoint, disk / "out", workers=1, **TOLD)
    assert not caught.value.mutated
    assert list(disk.iterdir()) == []


def test_conversion_resumes_after_disk_was_full(small_checkpoint, expected, small_disk) -> None:
    disk = small_disk(16 << 20)

    def fill(done: int, total: int) -> None:
        if done == total // 2:
            with pytest.raises(OSError), open(disk / "other", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    with pytest.raises(DiskFull):
        convert_as(small_checkpoint, disk / "out", workers=1, progress=fill, **TOLD)
    assert not (disk / "out").exists()
    (disk / "other").unlink()
    report = convert_as(small_checkpoint, disk / "out", workers=1, **TOLD)
    assert report.num_resumed >= report.num_tasks // 2
    assert files(disk / "out") == expected
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_second_run_of_running_job_is_rejected(small_checkpoint, expected, tmp_path) -> None:
    def again(done: int, total: int) -> None:
        if done == 3:
            with pytest.raises(DestinationError, match="another process is running the same job"):
                convert_as(small_checkpoint, tmp_path / "out", workers=1, **TOLD)

    convert_as(small_checkpoint, tmp_path / "out", workers=1, progress=again, **TOLD)
    assert files(tmp_path / "out") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_terminated_command_stops_its_workers(number, small_checkpoint, tmp_path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "convert", str(small_checkpoint), str(tmp_path / "out")]
    command += ["--devices", "cpu", "--workers", "2", "--op", "tests.support.jobs:hangs"]  # it does not end before
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60

    def workers() -> list[str]:
        """Return the children of the command's fork server."""
        found, parents = [], {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                parents[path.parent.name] = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            except (OSError, IndexError):
                continue
            if b"penstock_convert.workers.fork_server" in words:
                found.append(path.parent.name)
        return [one for one in found if parents.get(parents[one]) == str(process.pid)]

    while len(found := workers()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fds = [os.pidfd_open(int(pid)) for pid in found]
    process.send_signal(number)
    assert process.wait(30) != 0
    for fd in fds:
        assert select.select([fd], [], [], 20.0)[0], "a worker outlived the command"
        os.close(fd)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def server() -> Iterator[Callable[[], SwiftServer]]:
    """Starts an S3 server that holds one empty bucket."""
    try:
        SwiftServer.check()
    except Unavailable as why:
        pytest.skip(str(why))
    folders, running = list[Path](), list[SwiftServer]()

    def start() -> SwiftServer:
        folders.append(Path(tempfile.mkdtemp(prefix="ps-s3-")))
        one = SwiftServer(folders[-1])
        one.__enter__()
        running.append(one)
        one.make_bucket("weights")
        return one

    yield start
    for one in running:
        one.__exit__(None, None, None)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@long_running
def test_conversion_resumes_after_object_store_failure(
    small_checkpoint, expected, tmp_path, server, monkeypatch
) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "10")
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    first, workers = server(), WorkerSettings(num_workers=1, scratch=tmp_path)
    into = "s3://weights/converted"
    real, at_a_time, uploaded = obstore.put, threading.Lock(), list[str]()

    def put(store: Any, key: str, *args: Any, **options: Any) -> Any:
        with at_a_time:  # one is there, and the store goes away under the others
            if not uploaded:
                uploaded.append(key)
                return real(store, key, *args, **options)
            first.__exit__(None, None, None)
        return real(store, key, *args, **options)

    with monkeypatch.context() as patch, pytest.raises((SourceError, DestinationError)):
        patch.setattr(obstore, "put", put)
        convert_as(small_checkpoint, into, **TOLD, workers=replace(workers, storage_options=first.storage_options))
    second = server()
    report = convert_as(
        small_checkpoint, into, **TOLD, workers=replace(workers, storage_options=second.storage_options)
    )
    assert report.num_resumed == report.num_tasks
    assert list(tmp_path.iterdir()) == []
    store = second.store("weights")
    for name, data in expected.items():
        assert bytes(store.get(f"converted/{name}").bytes()) == data, name
    assert penstock.verify(into, storage_options=second.storage_options).verified


def test_trace_records_concurrent_work_of_workers(small_checkpoint, tmp_path) -> None:
    word = {"op": "function", "function": "tests.support.jobs:slowly"}
    told = {**TOLD, "operations": [word], "to": "cast:F32"}
    report = convert_as(
        small_checkpoint,
        tmp_path / "out",
        workers=penstock_convert.WorkerSettings(num_workers=2, trace=tmp_path / "trace.json"),
        **told,
    )
    events = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {f"w{i} cpu {name}" for i in range(2) for name in ("fetch", "compute", "send")} <= set(rows.values())
    stages = {(rows[one["pid"]], one["name"]) for one in events if one["ph"] == "E"}
    assert {("job", name) for name in ("plan", "room", "workers", "run", "publish", "close")} <= stages
    assert {(f"w{i} cpu stages", name) for i in range(2) for name in ("plan", "device", "end")} <= stages
    assert sorted(report.phases) == ["end", "move", "start"] and all(seconds > 0 for seconds in report.phases.values())
    assert sum(report.phases.values()) == pytest.approx(report.wall_s)
    spans = [(rows[one["pid"]], one["ts"], one["ts"] + one["dur"]) for one in events if one["ph"] == "X"]
    assert min(start for _, start, _ in spans) >= 0
    steps = [event for event in events if event["ph"] == "X"]
    # Copied tensors are read and written in one step.
    made_bytes = sum(
        e["args"]["bytes"] for e in steps if rows[e["pid"]].endswith("send") or e["name"].startswith("copy")
    )
    assert made_bytes >= report.nbytes
    computes = [(start, stop) for row, start, stop in spans if row.endswith("compute")]
    for other in ("fetch", "send"):  # while one task is computed, others are read and written
        beside = [(a, b) for row, a, b in spans if row.endswith(other)]
        assert any(a < stop and start < b for a, b in beside for start, stop in computes), other
    assert set(report.utilisation) == {"fetch", "compute", "send"}
    assert 0 < report.utilisation["compute"] <= 1
