"""The hub of one host: nothing to start, taken over if its process is killed or stopped, private to its user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from tests.support.hubs import key_state

from penstock.errors import ConfigError, HubUnavailable, UnknownMember
from penstock.hub import client as hub_client
from penstock.hub.client import HubClient
from penstock.hub.local_hub import LocalEndpoint
from penstock.hub.messages import Beat, ClaimRequest, Hello

_HOST = """
import sys, time
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, Hello
hub = HubClient.connect(None)
hub.hello(Hello(member=hub.member, host="h", doors=("unix:///c",)))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path_factory, monkeypatch) -> Path:
    found = tmp_path_factory.mktemp("run")
    found.chmod(0o700)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(found))
    return found


@pytest.fixture
def child(place):
    """A process that hosts the hub and is a member."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


def line_of(hub: HubClient) -> LocalEndpoint:
    assert isinstance(hub._endpoint, LocalEndpoint)
    return hub._endpoint


def hello(hub: HubClient) -> bytes:
    return hub.hello(Hello(member=hub.member, host="h", doors=("unix:///door",))).grant_key


def test_first_process_hosts_hub_and_grants_claims(place) -> None:
    with HubClient.connect(None) as first, HubClient.connect(None) as second:
        assert line_of(first).hosts and not line_of(second).hosts
        for hub in (first, second):
            hello(hub)
            assert hub.claim(ClaimRequest(member=hub.member, holding=key_state())).ranges
        assert [path.stat().st_mode & 0o777 for path in place.glob("*.sock")] == [0o600]
    assert not list(place.glob("*.sock"))


def test_concurrent_starts_create_one_local_hub(place) -> None:
    hubs: list[HubClient] = []
    threads = [threading.Thread(target=lambda: hubs.append(HubClient.connect(None))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(hubs) == 8 and sum(line_of(hub).hosts for hub in hubs) == 1
    for hub in hubs:
        hello(hub)
    assert len(hubs[3].status().members) == 8
    for hub in hubs:
        hub.close()


@pytest.mark.parametrize("end", ["killed", "left"])
def test_second_process_takes_over_local_hub(place, child, end) -> None:
    with HubClient.connect(None) as a, HubClient.connect(None) as b:
        key = hello(a)
        hello(b)
        assert not line_of(a).hosts and len(a.status().members) == 3
        if end == "killed":
            child.kill()
        else:
            child.stdin.close()
        child.wait(20)
        start = time.monotonic()
        with pytest.raises(UnknownMember):
            a.beat(a.member, Beat())
        assert time.monotonic() - start < 5
        assert line_of(a).hosts
        assert hello(a) == key
        hello(b)
        assert {member.member for member in b.status().members} == {a.member, b.member}
        # The kernel's locks treat `a` and `b` as different processes, although both are in this one.
        asked = ClaimRequest(member=b.member, holding=key_state())
        assert b.claim(asked).ranges == ()
        b.beat(b.member, Beat(holdings=(key_state(((0, 30),)),)))
        deadline = time.monotonic() + 30
        while not (found := a.claim(ClaimRequest(member=a.member, holding=key_state())).ranges):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found[0][0] == 30


def test_suspended_hub_process_is_replaced_then_rejoins(place, child, monkeypatch) -> None:
    monkeypatch.setattr(hub_client, "ATTEMPT_S", 2.0)
    with HubClient.connect(None) as a:
        hello(a)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # until all its threads have heard of it, it answers
        try:
            with pytest.raises(UnknownMember):
                a.beat(a.member, Beat())
            assert line_of(a).hosts
            hello(a)
        finally:
            child.send_signal(signal.SIGCONT)
        with HubClient.connect(None) as late:
            hello(late)
            assert {member.member for member in a.status().members} == {a.member, late.member}


_STOPPED_AT_ONCE = """
import os, signal
from penstock.hub.local_hub import LocalEndpoint
from penstock_hub.server import HubThread
def start(self):
    os.kill(os.getpid(), signal.SIGSTOP)
    raise SystemExit
HubThread.start = start
LocalEndpoint.open().reach(20.0)
"""


def test_hub_process_stopped_before_listening_is_replaced(place) -> None:
    process = subprocess.Popen([sys.executable, "-c", _STOPPED_AT_ONCE], env=dict(os.environ))
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)  # it holds the lock, and no client can connect to it
        with HubClient.connect(None) as hub:
            hello(hub)
            assert line_of(hub).hosts
    finally:
        process.kill()
        process.wait(10)


def test_request_to_unreachable_local_hub_fails_fast(place) -> None:
    with HubClient.connect(None) as first:
        path = line_of(first).reach(5.0).removeprefix("unix://")
        late = HubClient(LocalEndpoint.open(), timeout_s=0.5)
        os.rename(path, f"{path}.not yet")
        began = time.monotonic()
        with late, pytest.raises(HubUnavailable, match="is not listening"):
            late.status()
        assert time.monotonic() - began < 10  # a client of the default deadline would have waited for 20 s
        os.rename(f"{path}.not yet", path)
        assert not first.status().members


def test_forked_child_does_not_hold_hub_lock(place) -> None:
    # The child sends its own id. By then it has run its fork handlers and released what it inherited.
    script = _HOST.replace(
        'print("ready", flush=True)',
        "import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(60)",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None and process.stdin is not None
    forked = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(10)
        with HubClient.connect(None) as hub:
            assert line_of(hub).hosts
    finally:
        os.kill(forked, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()


def test_unusable_socket_directory_is_refused(tmp_path, monkeypatch) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private directory"):
        LocalEndpoint.open(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private directory"):
        LocalEndpoint.open(tmp_path / "link")
    with pytest.raises(ConfigError, match="too long"):
        LocalEndpoint.open(tmp_path / ("x" * 120))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        LocalEndpoint.open(tmp_path / "file" / "below")


def test_closed_client_refuses_requests(place) -> None:
    hub = HubClient.connect(None)
    hub.close()
    hub.close()
    with pytest.raises(HubUnavailable):
        hub.status()
