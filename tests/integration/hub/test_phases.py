"""`/v1/phases` of a process: as JSON, as events, with tokens. `penstock status` names the phase of a member."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")

import penstock as ps
from penstock import phases
from penstock.cli.fleet import status
from penstock.phases import BootRecord
from penstock.testing.checkpoints import write_llama
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN, LIMITED = "the-token-of-this-fleet", "a-token-for-another-model"


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> BootRecord:
    """Treat this process as one that has just started."""
    fresh = BootRecord()
    monkeypatch.setattr(phases, "_record", fresh)
    return fresh


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubThread]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{LIMITED} other*\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    thread = HubThread(Directory(MemoryStore(), beat_s=0.2), bind("127.0.0.1:0", auth), auth)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=1 << 20, shards=1)
    return tmp_path / "llama"


@pytest.fixture
def fleet(hub: HubThread) -> Iterator[ps.Fleet]:
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN, listen="127.0.0.1:0")
    with ps.join("llama", connection=connection) as fleet:
        yield fleet


Ask = Callable[..., http.client.HTTPResponse]


@pytest.fixture
def get() -> Iterator[Ask]:
    """Request a path from a server, each time on a new connection."""
    with contextlib.ExitStack() as stack:

        def get(url: str, path: str, token: str = "", **headers: str) -> http.client.HTTPResponse:
            if url.startswith("unix://"):
                connection = http.client.HTTPConnection("localhost", timeout=30)
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(30)
                connection.sock.connect(url.removeprefix("unix://"))
            else:
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
            stack.callback(connection.close)
            if token:
                headers["Authorization"] = f"Bearer {token}"
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            stack.callback(answer.close)
            return answer

        yield get


def read(answer: http.client.HTTPResponse) -> Any:
    assert (answer.status, answer.getheader("Content-Type")) == (200, "application/json")
    return json.loads(answer.read())


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    assert answer.status == 200
    assert (answer.getheader("Content-Type") or "").startswith("text/event-stream")
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def test_member_reports_startup_phases_over_http(fleet: ps.Fleet, get: Ask, model: Path) -> None:
    local, remote = fleet.member.server.addresses
    before = read(get(local, "/v1/phases"))
    assert (before["ready"], before["state"], before["phases"]) == (False, "starting", [])
    assert get(remote, "/v1/ready").status == 503
    report = fleet.fetch({}, fallback=model)
    now = read(get(local, "/v1/phases"))
    assert get(remote, "/v1/ready").status == 200
    assert (now["ready"], now["state"], now["phase"], now["error"]) == (True, "ready", "", None)
    assert (now["member"], now["models"]) == (fleet.member.id, ["llama"])
    assert {one["name"]: one.get("seconds", 0.0) for one in now["phases"]} == pytest.approx(report.phases, abs=1e-3)
    move = next(one for one in now["phases"] if one["name"] == "move")
    assert move["done_bytes"] == move["nbytes"] == report.nbytes
    assert now["process_s"] > 0 and now["seconds"] == pytest.approx(report.wall_s, abs=1e-3)
    # The engine continues. The replica is not ready until it is warm.
    with ps.telemetry.phase("warm up"):
        assert (read(get(local, "/v1/phases"))["phase"], get(local, "/v1/ready").status) == ("warm up", 503)
    assert get(local, "/v1/ready").status == 200


def test_phases_are_hidden_without_client_certificate(hub: HubThread, fleet: ps.Fleet, get: Ask) -> None:
    assert get(hub.url, "/v1/phases", TOKEN).status == 404
    _, remote = fleet.member.server.addresses
    for path in ("/v1/phases", "/v1/phases?stream"):
        assert get(remote, path, TOKEN).status == 403
    assert get(remote, "/v1/alive").status == 204


@pytest.mark.parametrize(("path", "headers"), [("?stream", {}), ("", {"Accept": "text/event-stream"})])
def test_member_streams_startup_phases(fleet: ps.Fleet, get: Ask, path: str, headers: dict[str, str]) -> None:
    stream = events(get(fleet.member.server.addresses[0], f"/v1/phases{path}", **headers))
    assert next(stream)["phases"] == []
    with ps.telemetry.phase("start"):
        assert next(event for event in stream if event["phase"] == "start")["state"] == "starting"
        with ps.telemetry.phase("compile"):
            assert any(event["phase"] == "compile" for event in stream)
    assert next(event for event in stream if event["ready"])["phases"][0]["state"] == "done"


def test_too_many_phase_streams_return_429(hub: HubThread, get: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.phases.MAX_STREAMS", 1)
    with ps.join("llama", connection=ps.ConnectionSettings(hub=hub.url, token=TOKEN)) as fleet:
        stream = events(get(fleet.member.server.addresses[0], "/v1/phases?stream"))
        next(stream)
        assert get(fleet.member.server.addresses[0], "/v1/phases?stream").status == 429
        assert get(fleet.member.server.addresses[0], "/v1/phases").status == 200
    assert list(stream) == []


def test_metrics_endpoint_shows_startup_without_fleet(get: Ask, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "metrics.token").write_text(LIMITED)
    with ps.telemetry.serve_metrics("127.0.0.1:0", token_file=tmp_path / "metrics.token") as endpoint:
        url = endpoint.url.removesuffix("/metrics")
        assert (get(url, "/v1/phases").status, get(url, "/v1/ready").status) == (401, 503)
        report = ps.load(model).report
        now = read(get(url, "/v1/phases", LIMITED))
        assert now["ready"] and {one["name"] for one in now["phases"]} == set(report.phases)
        assert next(events(get(url, "/v1/phases?stream", LIMITED))) == now
        assert get(url, "/v1/ready").status == 200


def test_status_shows_phase_of_unready_member(
    hub: HubThread, fleet: ps.Fleet, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        fleet.member.report_now()
        status(hub=hub.url, token_file=tmp_path / "tokens")
        return capsys.readouterr().out

    assert " idle " in shown()
    with ps.telemetry.phase("start"):
        assert " starting: start " in shown()
        fleet.fetch({}, fallback=model)
        with ps.telemetry.phase("warm up"):
            assert " whole, starting: warm up " in shown()
    assert " whole " in shown() and "starting" not in shown()


def test_attach_is_recorded_as_startup_phase(hub: HubThread, model: Path) -> None:
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)
    with ps.cache.WeightCache(connection=connection) as keeper:
        keeper.keep("llama", model)
        with ps.cache.attach("llama", connection=connection) as attached:
            boot = phases.boot_record().snapshot()
            assert boot is not None and boot.ready
            seconds = {one.name: one.seconds for one in boot.phases if one.journey == "attach"}
            assert seconds == pytest.approx(attached.report.phases, abs=1e-3)
        with pytest.raises(ps.NotFound):
            ps.cache.attach("other", connection=connection, timeout_s=0.0)
        boot = phases.boot_record().snapshot()
        assert boot is not None and boot.error is not None
        assert (boot.state, boot.phase, boot.error.model) == ("failed", "find", "other")


def test_phases_route_shows_phase_of_running_fetch(fleet: ps.Fleet, get: Ask, model: Path) -> None:
    """The fetch is held before its first chunk, so that the phase can be seen."""
    held, seen = threading.Event(), threading.Event()
    first = type(fleet.member).claim

    def claim(member: Any, *arguments: Any, **named: Any) -> Any:
        seen.set()
        assert held.wait(30)
        return first(member, *arguments, **named)

    fleet.member.claim = claim.__get__(fleet.member)  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: fleet.fetch({}, fallback=model))
    thread.start()
    assert seen.wait(30)
    now = read(get(fleet.member.server.addresses[0], "/v1/phases"))
    assert (now["state"], now["phase"]) == ("starting", "connect")
    held.set()
    thread.join()
    assert read(get(fleet.member.server.addresses[0], "/v1/phases"))["ready"]
