"""What `status` and `why` answer about a running sync, an unknown name, and a process that died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.main import app


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="ps-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield
    shutil.rmtree(directory)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_why_query_for_sync_lists_members_and_versions() -> None:
    sent, got = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with ps.publisher("policy", sent, mode="snapshot") as publisher, ps.subscriber("policy", got) as subscriber:
        publisher.publish(version=3)
        subscriber.update()
        publisher.publish(version=4)
        # Both sides report at once with their own heartbeat.
        deadline = time.monotonic() + 4
        while "1 behind" not in (text := str(ps.hub.why("policy"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = text.splitlines()
        assert len(lines) == 2 and all(line.startswith("sync policy: ") for line in lines)
        assert "is publisher 0 of 1: version 4" in lines[0]
        assert "is subscriber 0 of 1: version 3, 1 behind" in lines[1] and "path of its bytes" in lines[1]
        assert "reads storage" not in run("why", "policy")
        ids = {member.syncs[0].side: member.member for member in ps.hub.status("policy").members}
        assert ps.hub.why("policy", member=ids["subscriber"]).lines == (lines[1],)


def test_why_query_for_unknown_name_returns_explanation() -> None:
    with ps.join("llama"):
        for answer in (str(ps.hub.why("lama")), run("why", "lama")):
            assert "no member has, fetches, publishes or receives lama" in answer


def test_status_and_why_reports_convert_to_text_and_json() -> None:
    with ps.join("llama") as fleet:
        fleet.offer({"w": torch.ones(4)})
        status, why = ps.hub.status(), ps.hub.why("llama")
        assert status.summary() == str(status) and "1 member on 1 host\nllama: 1 whole" in str(status)
        assert why.summary() == "\n".join(why.lines) == str(why)
        for answer in (status, why):
            assert json.loads(json.dumps(answer.to_dict())) == json.loads(msgspec.json.encode(answer))
            assert answer._repr_html_().startswith("<pre>")


_HOLDER = """
import penstock as ps, torch, sys
fleet = ps.join("llama")
fleet.offer({"w": torch.ones(4)})
print(flush=True)
sys.stdin.read()
"""


def test_status_shows_failure_after_member_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_hub import page
    from penstock_hub.auth import Auth
    from penstock_hub.directory import Directory
    from penstock_hub.server import HubThread, bind
    from penstock_hub.store import MemoryStore

    monkeypatch.setattr(page, "SAMPLE_S", 0.2)
    monkeypatch.setattr(page, "INTERVAL_S", 0.2)
    path = f"{os.environ['PENSTOCK_RUNTIME_DIR']}/of-a-test.sock"
    directory = Directory(MemoryStore(), fresh=True, beat_s=0.2, ttl_s=1.5)
    hub = HubThread(directory, bind(f"unix://{path}", Auth()))
    hub.start()
    monkeypatch.setenv("PENSTOCK_HUB", hub.url)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _HOLDER], **pipes) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "\n"
            # A member that signs off leaves no trace.
            with ps.join("other") as fleet:
                fleet.offer({"w": torch.ones(4)})
            while not any(member.holdings for member in ps.hub.status().members):
                time.sleep(0.05)
            time.sleep(1.0)
        finally:
            holder.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 8
        # This process's heartbeats also report failures of earlier tests.
        while (
            not (found := [one for one in ps.hub.status().failures if one.model == "llama"])
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert [(one.model, one.error) for one in found] == [("llama", "PeerLost")]
        text = run("status")
        assert (
            text.startswith("no members\n")
            and "stopped sending heartbeats without signing off, and its copy was whole" in text
        )
        assert "PeerLost" in str(ps.hub.status("llama"))
    hub.stop()
