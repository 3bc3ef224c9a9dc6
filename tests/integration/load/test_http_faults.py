"""Every fault of a web server or object store is recovered by resuming, or raises a typed error with its name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.servers.http_server import Faults, RangeServer

from penstock.config import Settings
from penstock.errors import (
    ConfigError,
    FormatError,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceStalled,
    SourceTruncated,
    SourceUnavailable,
)
from penstock.storage import list_uris, open_source, read_small, write_small
from penstock.storage.http import HttpSource
from penstock.testing.source_suite import read, sample

NBYTES = 1_500_000
DATA = sample(NBYTES)
LONG_STALL = Settings(stall_s=60.0, retries=3)
FEW_RETRIES = Settings(stall_s=60.0, retries=2)
SHORT_STALL = Settings(stall_s=0.6, retries=2)
"""Timeout for silent servers. It is not shorter than a pause of a busy machine."""


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({"m.bin": DATA, "folder/n.bin": b"n", "empty": b""}) as running:
        yield running


@pytest.fixture
def opened(server: RangeServer) -> Iterator[Callable[[Settings], HttpSource]]:
    sources: list[HttpSource] = []

    def make(settings: Settings) -> HttpSource:
        source = open_source(f"{server.url}/m.bin", settings=settings)
        assert isinstance(source, HttpSource)
        sources.append(source)
        server.requests.clear()
        return source

    yield make
    for source in sources:
        source.close()


Open = Callable[[Settings], HttpSource]


@pytest.mark.parametrize(
    "faults",
    [
        *(Faults(status=status, num_requests=2) for status in (408, 429, 500, 502, 503, 504)),
        Faults(status=503, retry_after="0", num_requests=3),
        Faults(reset_after=0, num_requests=2),
        Faults(truncate_after=0, num_requests=2),
        Faults(reset_after=0, chunked=True, num_requests=1),
        Faults(chunked=True),
        Faults(weak_etag=True),
        Faults(slow_bytes_per_s=20_000_000),
        Faults(ignore_range=True),
    ],
    ids=str,
)
def test_read_recovers_from_transient_fault(server: RangeServer, opened: Open, faults: Faults) -> None:
    source = opened(LONG_STALL)
    server.faults = faults
    assert read(source, 0, [1, NBYTES - 1]) == (DATA, "http")


@pytest.mark.parametrize("how", ["truncate_after", "reset_after", "stall_after"])
def test_interrupted_read_resumes_at_last_byte(server: RangeServer, opened: Open, how: str) -> None:
    """No byte is requested twice after a clean break. The deadline starts at the last progress."""
    source = opened(Settings(stall_s=1.5 if how == "stall_after" else 60.0, retries=1))
    server.faults = Faults(**{how: 400_000})  # type: ignore[arg-type]
    assert read(source, 100_000, [NBYTES - 100_000])[0] == DATA[100_000:]
    starts = [request.range[0] for request in server.requests if request.range]
    assert starts[0] == 100_000
    assert starts == sorted(starts)
    assert len(starts) >= 4  # 1.4 MB in pieces of 400 kB
    if how != "reset_after":  # what a reset throws away is the kernel's choice
        assert starts == [100_000, 500_000, 900_000, 1_300_000]


@pytest.mark.parametrize(
    ("faults", "error", "num_requests"),
    [
        (Faults(status=401), PermissionDenied, 1),
        (Faults(status=403, error_code="AccessDenied"), PermissionDenied, 1),
        (Faults(status=400, error_code="ExpiredToken"), PermissionDenied, 1),
        (Faults(status=404), NotFound, 1),
        (Faults(status=410), NotFound, 1),
        (Faults(status=412), SourceChanged, 1),
        (Faults(status=416), SourceTruncated, 1),
        (Faults(status=418), SourceUnavailable, 1),
        (Faults(status=503), SourceUnavailable, 3),
        (Faults(reset_after=0), SourceUnavailable, 3),
        (Faults(truncate_after=0), SourceUnavailable, 3),
        (Faults(stall_after=0), SourceStalled, 3),
        (Faults(stall_after=-1), SourceStalled, 3),
        (Faults(wrong_content_range=True), SourceUnavailable, 1),
        (Faults(wrong_total=True), SourceChanged, 1),
        (Faults(content_encoding="gzip"), FormatError, 1),
        (Faults(ignore_range=True), SourceUnavailable, 1),
        (Faults(no_validators=True), SourceChanged, 1),
        (Faults(status=304), SourceUnavailable, 1),
    ],
    ids=str,
)
def test_permanent_fault_raises_typed_error(
    server: RangeServer, opened: Open, faults: Faults, error: type[PenstockError], num_requests: int
) -> None:
    source = opened(FEW_RETRIES if faults.stall_after is None else SHORT_STALL)
    server.faults = faults
    with pytest.raises(error) as caught:
        read(source, 1000, [500, 500])
    assert type(caught.value) is error
    assert caught.value.uri == f"{server.url}/m.bin"
    assert caught.value.byte_range in {(1000, 2000), None}
    assert caught.value.blame == "source"
    deadline = time.monotonic() + 20.0
    while len(server.requests) < num_requests and time.monotonic() < deadline:
        time.sleep(0.01)  # the last was sent, and given up, before a busy server had read it
    # If the machine paused for longer than the deadline, the last attempt ends before it is sent.
    least = num_requests if error is not SourceStalled else 2
    assert least <= len(server.requests) <= num_requests
    server.faults = Faults()
    assert read(source, 1000, [1000])[0] == DATA[1000:2000]


def test_error_code_from_body_is_reported(server: RangeServer, opened: Open) -> None:
    source = opened(FEW_RETRIES)
    server.faults = Faults(status=403, error_code="RequestTimeTooSkewed")
    with pytest.raises(PermissionDenied, match="RequestTimeTooSkewed"):
        read(source, 0, [1])


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(ignore_if_match=True),
        Faults(ignore_if_match=True, weak_etag=True),
        Faults(ignore_if_match=True, no_etag=True),
        Faults(ignore_if_match=True, no_validators=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("shorter", [0, 7])
def test_object_changed_between_ranges_raises_source_changed(server: RangeServer, faults: Faults, shorter: int) -> None:
    """Even a server that ignores conditions or has only dates never causes mixed contents."""
    if faults.no_validators and not shorter:
        pytest.skip("nothing tells the two objects apart")
    server.faults = faults
    source = open_source(f"{server.url}/m.bin", settings=FEW_RETRIES)
    try:
        assert read(source, 0, [10])[0] == DATA[:10]
        server.replace("m.bin", DATA[::-1][shorter:])
        with pytest.raises(SourceChanged):
            read(source, 10, [10])
    finally:
        source.close()


def test_object_changed_during_resume_raises_source_changed(server: RangeServer, opened: Open) -> None:
    source = opened(LONG_STALL)
    server.faults = Faults(stall_after=1000, slow_bytes_per_s=2000)
    failed: list[PenstockError] = []

    def work() -> None:
        try:
            read(source, 0, [NBYTES])
        except PenstockError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not server.requests:
        thread.join(0.01)
    server.replace("m.bin", DATA[::-1])
    server.faults = Faults()
    server.drop_connections()
    thread.join(60)
    assert [type(error) for error in failed] == [SourceChanged]


def test_object_shrunk_before_range_raises_source_changed(server: RangeServer, opened: Open) -> None:
    source = opened(FEW_RETRIES)
    server.faults = Faults(ignore_if_match=True)
    server.replace("m.bin", DATA[:100])
    with pytest.raises(SourceChanged, match="100"):
        read(source, 5000, [10])


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (Faults(status=403), PermissionDenied),
        (Faults(status=404), NotFound),
        (Faults(status=503), SourceUnavailable),
        (Faults(stall_after=-1), SourceStalled),
        (Faults(content_encoding="br"), FormatError),
    ],
    ids=str,
)
def test_fault_at_open_raises_typed_error(server: RangeServer, faults: Faults, error: type[PenstockError]) -> None:
    server.faults = faults
    with pytest.raises(error) as caught:
        settings = FEW_RETRIES if faults.stall_after is None else SHORT_STALL
        open_source(f"{server.url}/m.bin?X-Amz-Signature=secret", settings=settings)
    assert caught.value.uri == f"{server.url}/m.bin"
    assert "secret" not in str(caught.value)


def test_rejected_connection_raises_source_unavailable() -> None:
    with RangeServer({}) as gone:
        url = gone.url
    with pytest.raises(SourceUnavailable, match="refused"):
        open_source(f"{url}/x", settings=FEW_RETRIES)


def test_server_without_ranges_supports_sequential_reads(server: RangeServer) -> None:
    """A range from the middle is rejected, because it would download everything."""
    server.faults = Faults(ignore_range=True)
    source = open_source(f"{server.url}/m.bin", settings=FEW_RETRIES)
    try:
        assert read(source, 0, [8, 1000])[0] == DATA[:1008]
        assert read(source, 0, [NBYTES])[0] == DATA
        with pytest.raises(SourceUnavailable, match="Range"):
            read(source, 1, [1])
    finally:
        source.close()


def test_url_secrets_stay_out_of_errors(server: RangeServer) -> None:
    url = server.url.replace("http://", "http://user:pass%40word@") + "/m.bin?token=hidden#part"
    source = open_source(url, settings=FEW_RETRIES)
    try:
        assert source.uri == f"{server.url}/m.bin"
        read(source, 0, [1])
        assert all(request.path == "/m.bin?token=hidden" for request in server.requests)
        assert {request.headers["authorization"] for request in server.requests} == {"Basic dXNlcjpwYXNzQHdvcmQ="}
        server.faults = Faults(status=403)
        with pytest.raises(PermissionDenied) as caught:
            read(source, 0, [1])
        assert not {"hidden", "pass", "user"} & set(str(caught.value).replace(":", " ").replace("@", " ").split())
        assert "hidden" not in str(caught.value)
    finally:
        source.close()


def test_bearer_token_is_sent_to_origin_only(server: RangeServer) -> None:
    with RangeServer({"m.bin": DATA}) as other:
        server.faults = Faults(redirect_to=f"{other.url}/")
        options = {"bearer_token": "hf_x"}
        source = open_source(f"{server.url}/m.bin", settings=FEW_RETRIES, storage_options=options)
        try:
            assert read(source, 5, [10])[0] == DATA[5:15]
            assert server.requests[0].headers["authorization"] == "Bearer hf_x"
            assert all("authorization" not in request.headers for request in other.requests)
            assert len(server.requests) == 1  # where it leads is remembered
            other.faults = Faults(status=403, num_requests=1)  # until it is refused, as an expired link is
            assert read(source, 5, [10])[0] == DATA[5:15]
            assert len(server.requests) == 2
        finally:
            source.close()


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://x/y", "http://h:port/", "http://[::1"])
def test_non_http_redirect_raises(server: RangeServer, target: str) -> None:
    server.faults = Faults(redirect_to=target)
    with pytest.raises(SourceUnavailable, match="redirects"):
        open_source(f"{server.url}/m.bin", settings=FEW_RETRIES)


def test_circular_redirect_raises(server: RangeServer) -> None:
    server.faults = Faults(redirect_to=f"{server.url}/m.bin")
    with pytest.raises(SourceUnavailable, match="more than 5 redirects"):
        open_source(f"{server.url}/m.bin", settings=FEW_RETRIES)
    assert len(server.requests) == 6


def test_connections_are_reused(server: RangeServer, opened: Open) -> None:
    """Consecutive reads share a connection, even after rejected requests. A dropped connection is replaced at once."""
    source = opened(FEW_RETRIES)
    for at in range(20):
        read(source, at, [100])
    server.faults = Faults(status=403, error_code="AccessDenied", num_requests=1)
    with pytest.raises(PermissionDenied):
        read(source, 0, [1])
    assert server.num_connections == 1
    server.drop_connections()
    assert read(source, 0, [100])[0] == DATA[:100]
    assert server.num_connections == 2


def test_small_objects_are_read_over_http(server: RangeServer) -> None:
    assert read_small(f"{server.url}/folder/n.bin?sig=x", settings=FEW_RETRIES) == b"n"
    assert read_small(f"{server.url}/empty", settings=FEW_RETRIES) == b""
    assert read_small(f"{server.url}/none", settings=FEW_RETRIES) is None
    server.faults = Faults(status=403)
    with pytest.raises(PermissionDenied):
        read_small(f"{server.url}/m.bin", settings=FEW_RETRIES)


def test_plain_http_listing_and_writing_raise(server: RangeServer) -> None:
    assert list_uris(f"{server.url}/m.bin?sig=x", settings=FEW_RETRIES) == [f"{server.url}/m.bin?sig=x"]
    with pytest.raises(NotFound):
        list_uris(f"{server.url}/folder/", settings=FEW_RETRIES)
    with pytest.raises(ConfigError, match="is read-only"):
        write_small(f"{server.url}/new", b"x", settings=FEW_RETRIES)


@pytest.mark.parametrize("url", ["http://", "http:///x", "https://host:port/x", "http://[::1/x"])
def test_invalid_url_raises(url: str) -> None:
    with pytest.raises(ConfigError):
        open_source(url, settings=FEW_RETRIES)


def test_unknown_option_error_contains_its_name(server: RangeServer) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        open_source(f"{server.url}/m.bin", settings=FEW_RETRIES, storage_options={"endpoint": "x"})


def test_line_break_in_token_raises(server: RangeServer) -> None:
    with pytest.raises(ConfigError, match="line break"):
        open_source(f"{server.url}/m.bin", settings=FEW_RETRIES, storage_options={"bearer_token": "a\r\nX-Evil: 1"})
    assert not server.requests


def test_requests_use_http_proxy(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy receives the absolute URL, which this server has as a path."""
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert read_small("http://model.invalid/folder/n.bin", settings=FEW_RETRIES) == b"n"
    assert server.requests[0].path == "http://model.invalid/folder/n.bin"
    assert server.requests[0].headers["host"] == "model.invalid"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_forked_child_opens_new_connections(server: RangeServer, opened: Open) -> None:
    source = opened(FEW_RETRIES)
    read(source, 0, [10])
    child = os.fork()
    if child == 0:  # no pytest in the child: only an exit status
        os._exit(0 if read(source, 100, [1000])[0] == DATA[100:1100] else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert server.num_connections == 2
    assert read(source, 20, [10])[0] == DATA[20:30]
    assert server.num_connections == 2
