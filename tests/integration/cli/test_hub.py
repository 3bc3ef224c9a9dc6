"""`penstock hub`, `status` and `why` as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from tests.support import commands
from tests.support.fork_server import ForkServer
from tests.support.hubs import IDENTITY, key_state
from tests.support.processes import listening_ports

from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, FaultReport, Hello, UpstreamsRequest

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
TOKEN = "a-token-0123456789"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def penstock(fork_server: ForkServer) -> Run:
    return lambda *arguments: commands.run(fork_server, arguments)


@pytest.fixture
def tokens(tmp_path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"# of the fleet\n{TOKEN} llama\n")
    return file


@pytest.fixture
def hub(tokens, tmp_path):
    command = [*PENSTOCK, "hub", "--listen", "127.0.0.1:0", "--token-file", str(tokens), "--audit"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()
    assert "event=issued" in (tmp_path / "stderr").read_text()


def test_status_and_why_commands_describe_fleet(hub, tokens, penstock: Run) -> None:
    asked = ["--hub", hub, "--token-file", str(tokens)]
    assert "no member has or fetches llama" in penstock("status", "llama", *asked).stdout
    with HubClient.connect(hub, TOKEN, life="w") as w, HubClient.connect(hub, TOKEN, life="a") as a:
        for client, name in ((w, "w:1"), (a, "a:1")):
            client.hello(Hello(member=client.member, host="0123456789", doors=("unix:///d",), name=name))
        w.beat(w.member, Beat(holdings=(key_state(((0, 100),), num_readers=1, max_readers=8, gb_per_s=2.5),)))
        a.upstreams(UpstreamsRequest(member=a.member, holding=key_state(((0, 25),), path="shm <- w")))
        a.complain(FaultReport(member=a.member, of=w.member, key=IDENTITY.key(), fault="stalled"))
    done = penstock("status", "llama", *asked)
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    lines = {line[1]: line for line in rows}
    assert head[:4] == ["member", "host", "model", "key"]
    assert lines["a:1"][0] == a.member[:8] and "25/100" in lines["a:1"] and "(25%)" in lines["a:1"]
    assert "whole" in lines["w:1"] and "1/8" in lines["w:1"] and "complaints" in lines["w:1"]
    found = json.loads(penstock("status", "llama", *asked, "--format", "json").stdout)
    assert {member["member"] for member in found["members"]} == {a.member, w.member}
    text = penstock("why", "llama", *asked).stdout
    assert f"{a.member} is filling with 25 of 100 chunks" in text and f"{a.member} complains: stalled" in text
    assert json.loads(penstock("why", "llama", "--member", w.member, *asked, "--format", "json").stdout)["lines"]
    assert penstock("status", *asked).returncode == 3  # a token for one model
    assert penstock("status", "llama", "--hub", hub).returncode == 3
    with HubClient.connect(hub, TOKEN, life="w") as w:  # the entry may have expired on a slow machine
        w.hello(Hello(member=w.member, host="0123456789", doors=("unix:///d",), name="w:1"))
        w.beat(w.member, Beat(holdings=(key_state(((0, 100),)),)))
    watched = subprocess.Popen(
        [*PENSTOCK, "status", "llama", *asked, "--watch", "0.2", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watched.stdout is not None and watched.stderr is not None
    assert [watched.stdout.readline() for _ in range(2)] == ["{\n", '  "members": [\n']
    watched.send_signal(signal.SIGINT)
    watched.communicate(timeout=20)


def test_invalid_hub_options_raise_with_hint(tokens, tmp_path, penstock: Run) -> None:
    for arguments, word in (
        (["--listen", "0.0.0.0:0"], "could use the hub without authentication"),
        (["--listen", "127.0.0.1:0"], "--token-file"),
        (["--listen", "nowhere"], "cannot listen"),
        (["--cert", "c.pem"], "requires its private key"),
        (["--token-file", str(tmp_path / "none")], "cannot read token file"),
        (["--redis", "http://x"], "not a valid address for Redis"),
    ):
        done = penstock("hub", *arguments)
        assert done.returncode == 2 and word in done.stderr, done.stderr
    done = penstock("status", "--hub", "nothing")
    assert done.returncode == 2 and "not the address of a hub" in done.stderr


def test_local_hub_starts_without_options(tmp_path_factory, monkeypatch, penstock: Run) -> None:
    place = tmp_path_factory.mktemp("run")
    os.chmod(place, 0o700)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(place))
    assert penstock("status").stdout == "no members\n"
    assert "no member has, fetches, publishes or receives llama" in penstock("why", "llama").stdout


def test_default_hub_is_private_to_user(tmp_path_factory, monkeypatch, penstock: Run) -> None:
    place = tmp_path_factory.mktemp("run") / "below"
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(place))
    with subprocess.Popen([*PENSTOCK, "hub"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url == f"unix://{place}/hub.sock"
        assert place.stat().st_mode & 0o777 == 0o700
        assert listening_ports(process.pid) == []
        assert penstock("status", "--hub", url).stdout == "no members\n"
        second = penstock("hub")
        assert second.returncode == 2 and "is in use" in second.stderr
        process.terminate()
        assert process.wait(20) == 0
    os.chmod(place, 0o755)
    open_to_others = penstock("hub")
    assert open_to_others.returncode == 2 and "not a private directory of this user" in open_to_others.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_hub_removes_its_socket(tmp_path, number: signal.Signals) -> None:
    path = tmp_path / "hub.sock"
    command = [*PENSTOCK, "hub", "--listen", f"unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f"unix://{path}"
        assert path.exists()
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not path.exists()


def test_hub_stopped_during_request_logs_no_traceback(tmp_path) -> None:
    path = tmp_path / "hub.sock"
    command = [*PENSTOCK, "hub", "--listen", f"unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().strip() == f"unix://{path}"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            caller.sendall(b"POST /v1/hello HTTP/1.1\r\nHost: hub\r\nExpect: 100-continue\r\n")
            caller.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            caller.settimeout(20)
            assert caller.recv(99).startswith(b"HTTP/1.1 100")  # the hub waits for the body
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_public_address_without_tokens_is_refused() -> None:
    done = subprocess.run([*PENSTOCK, "hub", "--listen", "127.0.0.1:7070"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        "other users of this host, could use the hub" in done.stderr
        and "only processes of this user" not in done.stderr
    )
