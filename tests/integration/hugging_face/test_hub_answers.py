"""Responses of model hubs that are too long, too slow, too deeply nested, or redirect to other hosts."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.answers import Behave, Server, answer
from tests.support.servers.http_server import Faults, RangeServer

import penstock
from penstock.errors import FormatError, NotFound, PenstockError, SourceStalled, SourceUnavailable

TOKEN = "s3cret-token"


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    for _ in range(300):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def deepen(handler: BaseHTTPRequestHandler) -> None:
    answer(handler, 200, b'{"siblings": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def lengthen(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 40))
    handler.end_headers()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "0.6")
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(params=["hf", "ms"])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def load(scheme: str, endpoint: str) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        penstock.load(
            f"{scheme}://org/name",
            settings=penstock.ReadSettings(storage_options={"endpoint": endpoint, "token": TOKEN}),
        )
    return caught.value


@pytest.mark.parametrize(("behave", "error"), [(drip, SourceStalled), (deepen, FormatError), (lengthen, FormatError)])
def test_unbounded_listing_raises_typed_error(scheme: str, behave: Behave, error: type[PenstockError]) -> None:
    begun = time.monotonic()
    with Server(behave) as hub:
        assert isinstance(load(scheme, hub.url), error)
    assert time.monotonic() - begun < 5.0


def test_redirected_listing_carries_no_token(scheme: str) -> None:
    listing = json.dumps({"sha": "c" * 40, "siblings": []}).encode()
    with (
        Server(lambda handler: answer(handler, 200, listing)) as other,
        Server(lambda handler: answer(handler, 302, b"", Location=f"{other.url}/moved")) as hub,
    ):
        load(scheme, hub.url)
        assert any(TOKEN in value for value in hub.seen[0].values())
    assert other.seen
    assert not any(TOKEN in value for headers in other.seen for value in headers.values())


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fe80::1]/",
        "http://[fd00:ec2::254]/latest/",
        "http://[fd00:ec2::23]/v1/credentials",
        "http://[fd20:ce::254]/computeMetadata/v1/",
        "http://168.63.129.16/machine",
        "http://2852039166/latest/",
        "http://[::ffff:169.254.169.254]/",
        "http://metadata.google.internal/computeMetadata/v1/",
    ],
)
def test_redirect_to_metadata_service_is_refused(target: str) -> None:
    with (
        RangeServer({"m.safetensors": b""}, faults=Faults(redirect_to=target)) as server,
        pytest.raises(SourceUnavailable, match="redirects to"),
    ):
        penstock.load(f"{server.url}/m.safetensors")


class Names:
    """An injected resolver, which returns a name's addresses in turn and repeats the last address."""

    def __init__(self, patch: pytest.MonkeyPatch, answers: dict[str, list[str]]) -> None:
        self.asked: list[str] = []
        self.connected: list[str] = []
        resolve, connect = socket.getaddrinfo, socket.socket.connect

        def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
            if host not in answers:
                return resolve(host, port, *args, **options)
            self.asked.append(host)
            found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
            return resolve(found, port, *args, **options)

        def connected(sock: socket.socket, address: Any) -> None:
            # Members of earlier tests still talk to their hub through Unix sockets.
            if sock.family != socket.AF_UNIX:
                self.connected.append(address[0])
            connect(sock, address)

        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        patch.setattr(socket.socket, "connect", connected)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "fd00:ec2::254",
    ],
)
def test_redirect_to_metadata_host_opens_no_connection(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, {"weights.example": [address]})
    faults = Faults(redirect_to="http://weights.example/latest/")
    with (
        RangeServer({"m.safetensors": b""}, faults=faults) as server,
        pytest.raises(SourceUnavailable, match=r"redirects to 'weights\.example'"),
    ):
        penstock.load(f"{server.url}/m.safetensors")
    assert names.asked
    assert set(names.connected) == {"127.0.0.1"}


def test_redirect_connects_only_to_validated_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later lookups of the name return another address, so a second lookup would reach the service."""
    monkeypatch.setenv("PENSTOCK_STALL_S", "10")
    with Server(lambda handler: answer(handler, 404, b"")) as other:
        faults = Faults(redirect_to=f"http://weights.example:{urlsplit(other.url).port}/m.safetensors")
        # On a busy machine the client may connect a second time before the first connection has sent its request.
        for _ in range(5):
            names = Names(monkeypatch, {"weights.example": ["127.0.0.1", "169.254.169.254"]})
            with RangeServer({"m.safetensors": b""}, faults=faults) as server, pytest.raises(PenstockError) as caught:
                penstock.load(f"{server.url}/m.safetensors")
            # A reconnect looks the name up again and is rejected.
            assert isinstance(caught.value, NotFound | SourceUnavailable)
            assert set(names.connected) == {"127.0.0.1"}
            if other.seen:
                break
        assert other.seen, caught.value


def test_trickling_index_raises_source_stalled() -> None:
    begun = time.monotonic()
    with Server(drip) as server, pytest.raises(SourceStalled, match="not complete"):
        penstock.inspect(f"{server.url}/m/")
    assert time.monotonic() - begun < 10.0


def drip_ranges(handler: BaseHTTPRequestHandler) -> None:
    """Send a range of a file of 100,000 bytes, one byte at a time."""
    first, last = (int(one) for one in handler.headers["Range"].removeprefix("bytes=").split("-"))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/100000")
    handler.send_header("Content-Length", str(last - first + 1))
    handler.send_header("ETag", '"1"')
    handler.end_headers()
    for _ in range(300):
        handler.wfile.write(b"\0")
        time.sleep(0.1)


@pytest.mark.parametrize("verb", ["inspect", "safe_open"])
def test_trickling_header_raises_source_stalled(verb: str) -> None:
    begun = time.monotonic()
    with Server(drip_ranges) as server, pytest.raises(SourceStalled, match="not complete"):
        if verb == "inspect":
            penstock.inspect(f"{server.url}/m.safetensors")
        else:
            penstock.safe_open(f"{server.url}/m.safetensors", "np")
    assert time.monotonic() - begun < 10.0
