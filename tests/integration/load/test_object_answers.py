"""Object stores with endless listings and endless error bodies."""

from __future__ import annotations

import resource
import ssl
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace
from tests.support.answers import Behave, Server, answer
from tests.support.authority import Authority
from tests.support.servers.http_server import Faults, RangeServer

from penstock.config import Settings
from penstock.errors import FormatError, PenstockError, SourceStalled
from penstock.storage import objects
from penstock.types import MIB

SETTINGS = Settings(retries=0, stall_s=0.6)
PAGE = 1000
ROW = (
    "<Contents><Key>m/d/{0:08}.safetensors</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<Size>1</Size></Contents>"
)


def list_endlessly(handler: BaseHTTPRequestHandler) -> None:
    """Send a page of keys and the name of the next page."""
    query = parse_qs(urlsplit(handler.path).query)
    first = int(query.get("continuation-token", ["0"])[0])
    rows = "".join(map(ROW.format, range(first, first + PAGE)))
    if "delimiter" in query:
        rows = rows.replace("m/d/", "m/")
    token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>"
    body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}{rows}</ListBucketResult>"
    answer(handler, 200, body.encode(), **{"Content-Type": "application/xml"})


def found(server: Server | RangeServer, uri: str, settings: Settings = SETTINGS) -> list[str]:
    options = {"endpoint": server.url, "skip_signature": "true", "region": "us-east-1"}
    return objects.list_objects(uri, settings=settings, storage_options=options)


@pytest.fixture
def endless() -> Iterator[Server]:
    with Server(list_endlessly) as server:
        yield server


@pytest.mark.parametrize(
    ("uri", "name", "limit"),
    [
        ("s3://bucket/m/**", "MAX_LISTED_KEYS", 5_000),
        ("s3://bucket/m/**", "MAX_LISTED_BYTES", 50_000),
        ("s3://bucket/m/**/x", "MAX_SEEN_KEYS", 5_000),
    ],
)
def test_endless_listing_error_names_limit(
    endless: Server, uri: str, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, name, limit)
    with pytest.raises(FormatError, match=f"more than {limit:,}"):
        # A busy host may need more than the 0.6 s of the other tests for six pages.
        found(endless, uri, replace(SETTINGS, stall_s=30.0))
    assert len(endless.seen) < 20


def test_endless_directory_listing_raises(endless: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_LISTING", 1)
    begun = time.monotonic()
    with pytest.raises(SourceStalled, match=r"not complete after 0\.6 s"):
        found(endless, "s3://bucket/m/")
    assert time.monotonic() - begun < 5.0
    # The requests end too, so no background read is left.
    time.sleep(0.3)
    num = len(endless.seen)
    time.sleep(0.5)
    assert len(endless.seen) == num


def endless_response(status: int) -> Behave:
    """Return a handler that sends a status and an endless body."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"10000\r\n" + b"<" * 0x10000 + b"\r\n")
            time.sleep(0.01)

    return behave


@pytest.mark.parametrize("status", [200, 403, 500])
def test_endless_response_body_fails_at_deadline(status: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    with Server(endless_response(status)) as server, pytest.raises(PenstockError):
        found(server, "s3://bucket/m/**")
    assert time.monotonic() - begun < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * MIB / 1024


def test_https_store_rejects_http_redirect(tmp_path: Path) -> None:
    """obstore follows redirects, and metadata services use only http."""
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.sign("store", "127.0.0.1"))
    settings = replace(SETTINGS, ca_file=authority.ca_file)
    with (
        Server(list_endlessly) as other,
        RangeServer({}, faults=Faults(redirect_to=f"{other.url}/latest"), tls=tls) as store,
    ):
        with pytest.raises(PenstockError):
            found(store, "s3://bucket/m/**", settings)
        assert store.requests
    assert not other.seen
