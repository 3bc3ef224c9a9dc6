"""Hubs whose clocks jump or differ: readers continue. Each hub is a process with its own clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import Host
from tests.support import redis_server
from tests.support.compare import assert_same
from tests.support.fork_server import ForkServer

import penstock as ps

SHIFTED = """
import pathlib, sys, time

shift, time_of_day = pathlib.Path(sys.argv.pop(1)), time.time
time.time = lambda: time_of_day() + float(shift.read_text())

from penstock.cli.main import run

run(sys.argv[1:])
"""
"""A hub whose clock differs by the number in a file, which may change while it runs."""


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "10")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)


class ShiftedHub:
    """`penstock hub` as a process, on a Unix socket."""

    def __init__(self, directory: Path, name: str, shift_s: float, *arguments: str) -> None:
        self._shift = directory / f"{name}.shift"
        self.step(shift_s)
        listen = f"unix://{directory}/{name}.sock"
        command = [sys.executable, "-c", SHIFTED, str(self._shift), "hub", "--listen", listen, *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url == listen

    def step(self, shift_s: float) -> None:
        """Set the clock."""
        new = self._shift.with_suffix(".new")
        new.write_text(str(shift_s))
        os.replace(new, self._shift)  # replace in place, so that no reader sees a partial file

    def __enter__(self) -> ShiftedHub:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(20) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_readers_survive_hub_clock_step_back(
    stack: ExitStack, tmp_path: Path, small_checkpoint, expected_tensors
) -> None:
    hub = stack.enter_context(ShiftedHub(tmp_path, "hub", 0.0))
    holder = stack.enter_context(ps.join("m", connection=hub.url))
    holder.fetch({}, fallback=small_checkpoint)
    hub.step(-40.0)
    found: dict[str, torch.Tensor] = {}
    reader = stack.enter_context(ps.join("m", connection=hub.url))
    report = reader.fetch(found, timeout_s=20.0)
    assert_same(found, expected_tensors)
    assert report.faults == ()
    assert all(holder.member.id[:8] in path for path in report.nbytes_by_path)


@pytest.mark.skipif(redis_server.missing() is not None, reason=str(redis_server.missing()))
def test_hub_replicas_tolerate_one_minute_clock_difference(
    stack: ExitStack, tmp_path: Path, small_checkpoint, expected_tensors
) -> None:
    redis = stack.enter_context(redis_server.RedisServer(tmp_path))
    now, early = (
        stack.enter_context(ShiftedHub(tmp_path, name, shift_s, "--redis", redis.url))
        for name, shift_s in (("now", 0.0), ("early", -60.0))
    )
    holder = stack.enter_context(ps.join("m", connection=now.url))
    holder.fetch({}, fallback=small_checkpoint)
    found: dict[str, torch.Tensor] = {}
    reader = stack.enter_context(ps.join("m", connection=early.url))
    report = reader.fetch(found, fallback=small_checkpoint)
    assert_same(found, expected_tensors)
    assert report.faults == ()
    assert report.storage_bytes == 0, report.nbytes_by_path


def test_holder_is_readable_after_hub_restart(
    fork_server: ForkServer, host: Host, expected_tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    listen = f"unix://{host.directory}/own.sock"
    values = {
        "listen": listen,
        "fresh": True,
        "beat_s": 30.0,
        "ttl_s": 90.0,
    }  # no heartbeat repairs anything within the test
    with fork_server.fork("tests.support.fleet:run_hub_process", values) as hub:
        assert b"ready" in hub.stdout.readline()
        with ps.join("m", connection=listen) as holder:
            holder.offer(expected_tensors)
            holder.member.report_now()
            hub.send_signal(signal.SIGKILL)
            hub.wait()
            with fork_server.fork("tests.support.fleet:run_hub_process", values) as again:
                assert b"ready" in again.stdout.readline()
                # The request is made before the new hub's key is known, and repeated afterwards.
                holder.member.upstreams(holder.member.weights[0], can_read_storage=False)
                with ps.join("m", connection=listen) as reader:
                    found: dict[str, torch.Tensor] = {}
                    reader.fetch(found, timeout_s=10.0)
                assert_same(found, expected_tensors)
    assert "event=refused" not in caplog.text
