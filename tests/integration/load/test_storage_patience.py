"""Loads from slow servers continue while bytes arrive, and end soon after they stop."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.servers.http_server import Faults, RangeServer

import penstock
from penstock.config import Settings
from penstock.errors import ConfigError, PenstockError, SourceStalled, SourceUnavailable
from penstock.storage import Source
from penstock.storage.http import HttpSource
from penstock.storage.objects import StoreSource, open_object
from penstock.testing.source_suite import sample
from penstock.types import MIB

DATA = sample(3 * MIB)
HOW = ["url", "store"]
"""Read by URL directly into the caller's memory, and through obstore for stores whose URLs cannot be signed."""


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({"bucket/m.bin": DATA}) as running:
        yield running


def options(server: RangeServer, how: str) -> dict[str, str]:
    found = {"endpoint": server.url, "skip_signature": "true", "region": "x"}
    return found | {"request_payer": "true"} if how == "store" else found


Open = Callable[[str, Settings], Source]


@pytest.fixture
def opened(server: RangeServer) -> Iterator[Open]:
    sources: list[Source] = []

    def make(how: str, settings: Settings) -> Source:
        source = open_object("s3://bucket/m.bin", settings=settings, storage_options=options(server, how))
        assert isinstance(source, StoreSource if how == "store" else HttpSource)
        sources.append(source)
        server.requests.clear()
        return source

    yield make
    for source in sources:
        source.close()


def read(source: Source, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    source.readv(start, [memoryview(data)])
    return bytes(data)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("retries", [1, 3])
def test_truncated_responses_do_not_abort_read(server: RangeServer, opened: Open, how: str, retries: int) -> None:
    source = opened(how, Settings(stall_s=60.0, retries=retries))
    server.faults = Faults(truncate_share=0.6)
    assert read(source, 0, len(DATA)) == DATA


@pytest.mark.parametrize("how", HOW)
def test_busy_responses_do_not_abort_reads(server: RangeServer, opened: Open, how: str) -> None:
    """Of several concurrent ranges, one is rejected repeatedly while the others progress."""
    source = opened(how, Settings(stall_s=60.0, retries=1))
    server.faults = Faults(status=503, retry_after="0", every=2)
    failed: list[PenstockError] = []

    def work(first: int) -> None:
        try:
            for at in range(first * 65_536, len(DATA), 6 * 65_536):
                nbytes = min(65_536, len(DATA) - at)
                assert read(source, at, nbytes) == DATA[at : at + nbytes]
        except PenstockError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed


def test_rejected_range_is_retried_while_other_ranges_succeed(server: RangeServer, opened: Open) -> None:
    """One range gets more 500s than `retries`, with other ranges served between them."""
    source = opened("url", Settings(stall_s=60.0, retries=1))
    done = threading.Event()
    got: list[bytes] = []

    def others() -> None:
        while not done.is_set():
            read(source, MIB, 1)

    server.faults = Faults(status=500, ranges_with="bytes=0-", num_requests=4)
    beside = threading.Thread(target=others)
    beside.start()
    try:
        got.append(read(source, 0, 1000))
    finally:
        done.set()
        beside.join(60)
    assert got == [DATA[:1000]]


@pytest.mark.parametrize("after", ["1", "date"])
def test_retry_after_header_delays_next_request(server: RangeServer, opened: Open, after: str) -> None:
    from email.utils import formatdate

    source = opened("url", Settings(stall_s=60.0, retries=0))
    text = formatdate(time.time() + 2, usegmt=True) if after == "date" else after
    server.faults = Faults(status=503, retry_after=text, num_requests=3 if after == "1" else 1)
    began = time.monotonic()
    assert read(source, 0, 1000) == DATA[:1000]
    assert time.monotonic() - began > (2.5 if after == "1" else 0.9)


def test_long_retry_after_header_fails_at_stall_deadline(server: RangeServer, opened: Open) -> None:
    source = opened("url", Settings(stall_s=2.0, retries=3))
    server.faults = Faults(status=503, retry_after="86400")
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"asked to wait .*HTTP 503"):
        read(source, 0, 1000)
    assert 1.9 < time.monotonic() - began < 15
    assert len(server.requests) <= 4


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stall_after", [-1, 0])
def test_silent_server_is_reported_at_deadline(server: RangeServer, opened: Open, how: str, stall_after: int) -> None:
    """No connection is left, although the error is stored."""
    source = opened(how, Settings(stall_s=2.0, retries=3))
    read(source, 0, 1000)
    server.faults = Faults(stall_after=stall_after)
    errors: list[SourceStalled] = []

    def work(at: int) -> None:
        with pytest.raises(SourceStalled) as caught:
            read(source, at, MIB // 2)
        errors.append(caught.value)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(at,)) for at in range(0, 6 * MIB // 2, MIB // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - began < 12, "it took several times stall_s"
    assert len(errors) == 6
    source.close()
    deadline = time.monotonic() + 20
    while connections_to(server) > 1:  # obstore may keep one that is idle
        assert time.monotonic() < deadline, connections_to(server)
        time.sleep(0.05)


def connections_to(server: RangeServer) -> int:
    """Return the established connections between this process and the server, which runs in this process."""
    gc.collect()
    port = f":{int(server.url.rpartition(':')[2]):04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == "01" for row in rows)


def test_shortened_response_is_continued_immediately(server: RangeServer, opened: Open) -> None:
    source = opened("url", Settings(stall_s=60.0, retries=3))
    server.faults = Faults(most_bytes=1024)
    assert read(source, 1000, 2 * MIB) == DATA[1000 : 1000 + 2 * MIB]
    assert len(server.requests) == 2
    assert server.requests[1].headers["range"] == "bytes=2024-"


def test_read_completes_from_shortened_responses(server: RangeServer, opened: Open) -> None:
    source = opened("url", Settings(stall_s=60.0, retries=3))
    server.faults = Faults(most_bytes=65_536, also_open_ranges=True)
    assert read(source, 0, MIB) == DATA[:MIB]
    assert read(source, MIB, MIB) == DATA[MIB : 2 * MIB]
    assert len(server.requests) == 32
    assert sum(request.headers["range"].endswith("-") for request in server.requests) == 1


def test_response_without_length_raises(server: RangeServer, opened: Open) -> None:
    source = opened("store", Settings(stall_s=60.0, retries=1))
    server.faults = Faults(chunked=True)
    with pytest.raises(SourceUnavailable, match="has no Content-Length") as caught:
        read(source, 0, 1000)
    assert "Generic" not in str(caught.value)
    assert read(opened("url", Settings(stall_s=60.0, retries=1)), 0, 1000) == DATA[:1000]


def secret_of(error: BaseException) -> bool:
    return "pass" in str(error) or "s3cr3t" in str(error) or "Signature=" in str(error)


@pytest.mark.parametrize("how", HOW)
def test_endpoint_password_stays_out_of_messages(server: RangeServer, how: str) -> None:
    with RangeServer({}) as gone:
        dead = gone.url
    for url in (server.url, dead):
        given = options(server, how) | {"endpoint": url.replace("http://", "http://user:pass%40s3cr3t@")}
        with pytest.raises(PenstockError) as caught:
            source = open_object(
                "s3://bucket/none.bin", settings=Settings(stall_s=3.0, retries=0), storage_options=given
            )
            source.close()
        assert not secret_of(caught.value), caught.value


def test_signed_url_secrets_stay_out_of_messages() -> None:
    url = "https://u:s3cr3t@host/m.bin?X-Amz-Signature=s3cr3t&X-Amz-Credential=s3cr3t"
    error = SourceUnavailable(f"GET {url} failed", uri=url, hint="try again")
    assert not secret_of(error) and "s3cr3t" not in repr(error.args) + error.message + str(error.uri)
    assert error.uri == "https://host/m.bin"


@pytest.mark.parametrize("endpoint", ["host:9000", "127.0.0.1:9000", "://x", "http://", "http://h:port", "ftp://h", ""])
def test_invalid_endpoint_raises_config_error(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, name in (("s3", "endpoint"), ("s3", "aws_endpoint_url"), ("gs", "base_url"), ("az", "endpoint")):
        with pytest.raises(ConfigError, match=name):
            penstock.load(
                f"{scheme}://bucket/model/",
                settings=penstock.ReadSettings(storage_options={name: endpoint, "skip_signature": "true"}),
            )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "user:s3cr3t@host:9000")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL") as caught:
        penstock.load("s3://bucket/model/")
    assert "s3cr3t" not in str(caught.value)
