"""A conversion that reports to a hub: what `status` shows, and a hub that is away or refuses it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import penstock as ps
import penstock_convert
from penstock.hub.job_state import JobState
from penstock.testing.checkpoints import write_llama
from penstock_convert.job_reporter import HubReporter
from penstock_convert.workers.launch import LocalLauncher
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")
WAITS = [{"op": "function", "function": "tests.support.jobs:waits"}]
TOKEN, LIMITED = "a-token-of-this-hub", "a-token-for-one-model"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("convert") / "llama"
    write_llama(directory, total_bytes=16_000_000)
    return directory


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubThread]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{LIMITED} llama*\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    thread = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    thread.start()
    yield thread
    thread.stop()


class Recorder:
    """An observer that keeps every state and may act at each."""

    def __init__(self, at=lambda state: None) -> None:
        self.states: list[JobState] = []
        self._at = at

    def begin(self):
        def put(state: JobState) -> None:
            self.states.append(state)
            self._at(state)

        return put


def test_conversion_reports_phases_from_starting_to_done(source: Path, tmp_path: Path) -> None:
    seen = Recorder()
    settings = penstock_convert.WorkerSettings(num_workers=2, task_bytes="1M", observer=seen)
    report = ps.convert(source, tmp_path / "out", to="cast:F32", devices="cpu", workers=settings)
    phases = [state.phase for state in seen.states]
    assert phases[0] == "starting" and phases[-2:] == ["publishing", "done"]
    assert set(phases[1:-2]) <= {"running"}
    last = seen.states[-1]
    assert (last.name, last.destination, last.sources) == ("out", str(tmp_path / "out"), (str(source),))
    assert (last.num_done, last.num_tasks, last.revision) == (report.num_tasks, report.num_tasks, report.revision)
    assert last.done_bytes == last.total_bytes > 16_000_000 and last.gb_per_s > 0 and last.eta_s == 0
    assert {worker.worker for worker in last.workers} == {worker.worker for worker in report.workers}
    # On a busy machine a task may be assigned to a second worker, and then both may finish it.
    ended = sum(worker.num_tasks for worker in last.workers)
    assert 0 <= ended - report.num_tasks <= last.num_duplicated + last.num_reassigned
    # The same call again runs nothing, because everything was done before.
    ps.convert(source, tmp_path / "out", to="cast:F32", devices="cpu", workers=settings)
    assert (seen.states[-1].phase, seen.states[-1].num_resumed) == ("done", report.num_tasks)


def test_hub_shows_late_and_lost_workers(source: Path, tmp_path: Path) -> None:
    stopped: list[str] = []
    late: list[JobState] = []

    def at(state: JobState) -> None:
        """Stop a worker that has finished tasks. Kill it once it is late."""
        at_work = [worker for worker in state.workers if worker.state == "running"]
        if not stopped and any(worker.num_tasks for worker in at_work):
            stopped.append(next(worker.worker for worker in at_work if worker.num_tasks))
            os.kill(launcher._processes[stopped[0]].pid, signal.SIGSTOP)
        elif not late and any(worker.is_late and worker.worker in stopped for worker in at_work):
            late.append(state)
            os.kill(launcher._processes[stopped[0]].pid, signal.SIGKILL)

    seen = Recorder(at)
    with LocalLauncher("cpu", 2) as launcher:
        settings = penstock_convert.WorkerSettings(num_workers=2, task_bytes="1M", observer=seen, launcher=launcher)
        ps.convert(source, tmp_path / "out", operations=WAITS, devices="cpu", workers=settings)
    (state,) = late
    shown = next(worker for worker in state.workers if worker.worker == stopped[0])
    assert state.workers[0].is_late and state.num_late >= 1
    assert shown.task >= 0 and shown.task_s > 2 * shown.expected_s
    assert state.phase == "running" and 0 < state.num_done < state.num_tasks
    assert state.eta_s > 0 and state.gb_per_s > 0
    last = seen.states[-1]
    assert (last.phase, last.num_late) == ("done", 0)
    lost = next(worker for worker in last.workers if worker.worker == stopped[0])
    assert lost.state == "lost" and "SIGKILL" in lost.end
    assert last.num_reassigned + last.num_duplicated > 0


def test_hub_lists_conversion_until_it_finishes(hub: HubThread, source: Path, tmp_path: Path) -> None:
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)
    settings = penstock_convert.WorkerSettings(num_workers=2, task_bytes="1M", observer=HubReporter(connection))
    ran: list[JobState] = []

    def progress(done: int, total: int) -> None:
        ran.extend(job.state for job in ps.hub.status(connection=connection).jobs)

    into = tmp_path / "llama-slow"
    report = ps.convert(source, into, operations=WAITS, devices="cpu", workers=settings, progress=progress)
    assert "running" in {state.phase for state in ran}
    assert any(0 < state.num_done < state.num_tasks and state.eta_s > 0 for state in ran)
    (job,) = ps.hub.status(connection=connection).jobs
    assert (job.state.phase, job.state.revision, job.state.num_done) == ("done", report.revision, report.num_tasks)
    assert job.state.destination == str(into)
    # A token shows only the conversions of its models.
    limited = ps.ConnectionSettings(hub=hub.url, token=LIMITED)
    assert [seen.job for seen in ps.hub.status("llama-slow", connection=limited).jobs] == [job.job]
    assert ps.hub.status("llama", connection=limited).jobs == ()


def test_hub_lists_failed_conversion_with_its_error(hub: HubThread, source: Path, tmp_path: Path) -> None:
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)
    settings = penstock_convert.WorkerSettings(num_workers=1, task_bytes="1M", observer=HubReporter(connection))
    broken = [{"op": "function", "function": "tests.support.jobs:raises"}]
    with pytest.raises(ps.errors.OperationFailed):
        ps.convert(source, tmp_path / "out", operations=broken, devices="cpu", workers=settings)
    (job,) = ps.hub.status(connection=connection).jobs
    assert job.state.phase == "failed" and job.state.error is not None
    assert (job.state.error.error, job.state.error.blame) == ("OperationFailed", ps.errors.OperationFailed.blame)
    assert "on purpose" in job.state.error.message


@pytest.mark.parametrize("token", [TOKEN, "not-a-token-of-this-hub", LIMITED])
def test_unavailable_hub_is_logged_once(
    hub: HubThread, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    """The hub is away if the token is valid, because it is stopped first."""
    if token == TOKEN:
        hub.stop()
    reporter = HubReporter(ps.ConnectionSettings(hub=hub.url, token=token))
    settings = penstock_convert.WorkerSettings(num_workers=1, task_bytes="1M", observer=reporter)
    with caplog.at_level(logging.WARNING, "penstock.fleet"):
        report = ps.convert(source, tmp_path / "out", to="cast:F32", devices="cpu", workers=settings)
        for thread in threading.enumerate():
            if thread.name == "penstock-job-report":
                thread.join(10)
    assert report.num_tasks > 10
    logged = [record for record in caplog.records if record.name == "penstock.fleet"]
    assert len(logged) == 1 and "conversion" in logged[0].getMessage()


def test_convert_command_reports_to_hub(hub: HubThread, source: Path, tmp_path: Path) -> None:
    hub_options = ["--hub", hub.url, "--token-file", str(tmp_path / "tokens")]
    options = ["--to", "cast:F32", "--devices", "cpu", "--workers", "1", "--format", "json", *hub_options]
    ended = command("convert", str(source), str(tmp_path / "out"), *options)
    (job,) = ps.hub.status(connection=ps.ConnectionSettings(hub=hub.url, token=TOKEN)).jobs
    assert (job.state.phase, job.state.revision) == ("done", json.loads(ended)["revision"])
    shown = command("status", *hub_options)
    assert "out " in shown and "done" in shown


def command(*words: str) -> str:
    """Run a command of Penstock, and return its stdout."""
    line = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout
