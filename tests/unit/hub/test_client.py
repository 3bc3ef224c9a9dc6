"""The hub's client: certificates from the environment, closed connections, and detection of a silent hub."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from penstock.errors import (
    ConfigError,
    FormatError,
    GrantRefused,
    HubUnavailable,
    IntegrityError,
    PenstockError,
    PermissionDenied,
    PlanError,
)
from penstock.http.control import NoAnswer
from penstock.hub import client
from penstock.hub.client import HubClient
from penstock.hub.messages import Status
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore


@pytest.mark.parametrize("name", ["PENSTOCK_CA_FILE", "PENSTOCK_CERT_FILE"])
def test_missing_tls_file_from_environment_raises_config_error(name: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(name, str(tmp_path / "absent.pem"))
    with (
        HubClient.connect("https://127.0.0.1:1", timeout_s=0.2) as hub,
        pytest.raises(ConfigError, match="certificate"),
    ):
        hub.status()


class _Told:
    """A connection that records its requests."""

    is_busy = False

    def __init__(self) -> None:
        self.silent: list[bool] = []

    def reach(self, within_s: float) -> str:
        return "http://127.0.0.1:1"

    def reached(self) -> None: ...

    def failed(self, url: str, *, silent: bool) -> None:
        self.silent.append(silent)

    def close(self) -> None: ...


class _Clock:
    """A clock that advances only in sleep, so that the number of requests does not depend on the machine."""

    def __init__(self) -> None:
        self._now = 100.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_connection_dropped_during_open_raises_hub_unavailable(monkeypatch) -> None:
    hub = HubClient(_Told(), timeout_s=0.3)
    open_client = hub._open

    def dropped(url: str) -> object:
        client = open_client(url)
        client.close()
        return client

    monkeypatch.setattr(hub, "_open", dropped)
    with hub, pytest.raises(HubUnavailable):
        hub.status()


def test_short_request_deadline_does_not_mark_hub_silent(monkeypatch) -> None:
    line, clock = _Told(), _Clock()

    class Slow:
        @contextmanager
        def connection(self) -> Iterator[object]:
            yield self

        def request(self, *args: object, **options: object) -> None:
            clock.sleep(0.05)
            raise ConnectionRefusedError if len(line.silent) < 2 else NoAnswer

        def close(self) -> None: ...

    monkeypatch.setattr(client, "time", clock)
    hub = HubClient(line, timeout_s=0.2)
    monkeypatch.setattr(hub, "_open", lambda url: Slow())
    # In the main thread an error from this file would count as an error of a signal handler.
    with hub, ThreadPoolExecutor(1) as pool, pytest.raises(HubUnavailable):
        pool.submit(hub.status).result()
    assert len(line.silent) > 2 and not any(line.silent)


def test_unresponsive_hub_is_marked_silent(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        line = _Told()
        monkeypatch.setattr(line, "reach", lambda within_s: f"http://127.0.0.1:{mute.getsockname()[1]}")
        with HubClient(line, timeout_s=0.2) as hub, pytest.raises(HubUnavailable):
            hub.status()
    assert line.silent[0]


@pytest.mark.parametrize(
    "raised",
    [GrantRefused("m", hint="h"), PermissionDenied("m"), PlanError("m"), IntegrityError("m"), FormatError("m")],
)
def test_hub_error_is_raised_with_same_class_in_client(raised: PenstockError, tmp_path) -> None:
    class Failing(Directory):
        def status(self, model: str | None = None) -> Status:
            raise raised

    hub = HubThread(Failing(MemoryStore()), bind(f"unix://{tmp_path}/hub.sock", Auth()))
    hub.start()
    try:
        with HubClient.connect(hub.url) as asks, pytest.raises(type(raised)) as caught:
            asks.status()
        assert type(caught.value) is type(raised) and caught.value.message == "m"
        assert caught.value.hint == raised.hint
    finally:
        hub.stop()
