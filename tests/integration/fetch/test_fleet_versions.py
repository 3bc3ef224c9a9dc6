"""Members, hubs and addresses of several versions: added fields are ignored, and another major version is refused."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
from tests.support.compare import assert_same

import penstock as ps
from penstock.errors import ConfigError, PenstockError, PlanError
from penstock.http.control import ControlConnection, over_unix
from penstock.http.server import ServerExchange
from penstock.hub.client import HubClient
from penstock.hub.messages import PROTOCOL, PROTOCOL_HEADER, UPGRADE_HINT, Hello, Lease, MemberSession
from penstock.peer import server as peer_server
from penstock_hub.app import OPERATIONS, HubOperation
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

NEWER = {"added_later": {"a": [1, "b"]}}
STRICT = {"identity", "differences", "parallel"}
"""An identity is compared completely. Ignoring a field would treat different weights as equal."""


def with_more_fields(value: Any, *, inside: str = "") -> Any:
    """Return a message as a newer version would send it, with more fields in each object."""
    if isinstance(value, dict):
        more = {} if inside in STRICT or inside == "regions" else NEWER
        return {name: with_more_fields(one, inside=name) for name, one in value.items()} | more
    if isinstance(value, list):
        return [with_more_fields(one, inside=inside) for one in value]
    return value


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    running = HubThread(Directory(MemoryStore(), fresh=True), bind(f"unix://{tmp_path}/hub.sock", _no_auth()))
    running.start()
    yield running.url
    running.stop()


def _no_auth() -> Any:
    from penstock_hub.auth import Auth

    return Auth()


MEMBER = "[0-9a-f]{8}"
Change = Callable[[Any], Any]


@pytest.fixture
def proxy(hub: str) -> Iterator[Callable[[Change, Change], str]]:
    """A proxy between members and the hub that changes their messages."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(asked: Change, answered: Change) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if body:
                    body = json.dumps(asked(json.loads(body))).encode()
                headers = {"Penstock-Life": self.headers.get("Penstock-Life", "")}
                with ControlConnection(over_unix(urlsplit(hub).path), "hub") as connection:
                    status, raw = connection.request(self.command, self.path, body, headers, timeout_s=20.0)
                if raw:
                    raw = json.dumps(answered(json.loads(raw))).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_PUT = do_DELETE = forward

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def unchanged(value: Any) -> Any:
    return value


@pytest.mark.parametrize("who", ["members", "the hub"])
def test_unknown_fields_from_newer_minor_version_are_ignored(
    hub: str, proxy, small_checkpoint, expected_tensors, who: str
) -> None:
    changes = (with_more_fields, unchanged) if who == "members" else (unchanged, with_more_fields)
    url = proxy(*changes)
    found: dict[str, torch.Tensor] = {}
    with ps.join("m", connection=url) as holder, ps.join("m", connection=url) as reader:
        holder.fetch({}, fallback=small_checkpoint)
        report = reader.fetch(found, timeout_s=20.0)
        assert reader.member.hub.status("m").members
    assert_same(found, expected_tensors)
    assert report.faults == () and all(holder.member.id[:8] in path for path in report.nbytes_by_path)


def test_unknown_fields_from_newer_member_are_ignored(
    hub: str, small_checkpoint, expected_tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, read = peer_server._send, ServerExchange.read_body

    def newer_answer(exchange: ServerExchange, code: int, value: Any) -> None:
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(value)) if value is not None else None
        send(exchange, code, with_more_fields(raw))

    def newer_question(self: ServerExchange, max_bytes: int) -> bytes:
        raw = msgspec.msgpack.decode(read(self, max_bytes))
        return msgspec.msgpack.encode(with_more_fields(raw))

    monkeypatch.setattr(peer_server, "_send", newer_answer)
    monkeypatch.setattr(ServerExchange, "read_body", newer_question)
    found: dict[str, torch.Tensor] = {}
    with ps.join("m", connection=hub) as holder, ps.join("m", connection=hub) as reader:
        holder.fetch({}, fallback=small_checkpoint)
        report = reader.fetch(found, timeout_s=20.0)
    assert_same(found, expected_tensors)
    assert report.faults == ()


@pytest.mark.parametrize("theirs", ["3.0", "1.7", None])
def test_member_with_different_major_version_is_refused(hub: str, proxy, theirs: str | None) -> None:
    def other(value: Any) -> Any:
        if "doors" not in value:
            return value
        rest = {name: one for name, one in value.items() if name != "protocol"}
        return rest | ({} if theirs is None else {"protocol": theirs}) | {"doors": "of another shape by now"}

    with pytest.raises(
        ConfigError, match=f"member {MEMBER} speaks protocol {theirs or '1.0'}, the hub speaks {PROTOCOL}"
    ):
        ps.join("m", connection=proxy(other, unchanged))


def test_hub_with_different_major_version_is_refused(hub: str, proxy) -> None:
    def other(value: Any) -> Any:
        return {"protocol": "3.1", "ttl_s": "of another shape by now"} if "grant_key" in value else value

    with pytest.raises(ConfigError, match=f"the hub speaks protocol 3.1, this process speaks {PROTOCOL}"):
        ps.join("m", connection=proxy(unchanged, other))


def test_invalid_protocol_version_is_refused(hub: str) -> None:
    with HubClient.connect(hub) as client, pytest.raises(PlanError, match="protocol"):
        client.hello(Hello(member=client.member, host="h", doors=("unix:///d",), protocol="new"))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_hub_refuses_every_request_with_wrong_major_version(hub: str, operation: HubOperation, caplog) -> None:
    path = operation.path.replace("{member}", "m")
    with ControlConnection(over_unix(urlsplit(hub).path), "hub") as connection:
        code, raw = connection.request(
            operation.method, path, b"of another shape", {PROTOCOL_HEADER: "3.0"}, timeout_s=20.0
        )
    fault = json.loads(raw)
    assert (code, fault["hint"]) == (400, UPGRADE_HINT)
    assert fault["error"].startswith(f"this caller speaks protocol 3.0, the hub speaks {PROTOCOL}")
    assert f"event=version path={path!r} protocol='3.0'" in caplog.text


def test_protocol_mismatch_with_hub_raises_config_error(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hub.client.PROTOCOL", "3.0")
    refused = pytest.raises(ConfigError, match=f"this caller speaks protocol 3.0, the hub speaks {PROTOCOL}")
    with refused:
        ps.hub.status("m", connection=hub)
    with refused:
        ps.hub.why("m", connection=hub)
    with refused:
        ps.cache.attach("m", connection=hub)


def test_member_logs_hub_with_different_major_version(hub: str, caplog) -> None:
    with ps.join("m", connection=hub) as fleet:
        # For the hub the member now has a different version, as all members do after an upgrade.
        headers = fleet.member.hub._headers
        headers[PROTOCOL_HEADER] = "3.0"
        fleet.member.beat_now()
        deadline = time.monotonic() + 30
        while "the hub refuses member" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        headers[PROTOCOL_HEADER] = PROTOCOL
    assert f"speaks protocol 3.0, the hub speaks {PROTOCOL}" in caplog.text


@pytest.mark.parametrize("room", ["leases", "sync"])
def test_member_refuses_reader_with_different_major_version(hub: str, room: str) -> None:
    shards = {"w": ps.Shard(tensor=torch.zeros(4), global_shape=(8,), offset=(0,))}
    with ps.publisher("policy", shards, rank=(0, 2), connection=hub) as publisher:
        (path,) = [urlsplit(url).path for url in publisher.member.server.addresses]
        asked = {"member": ["m"], "key": "of another shape", "protocol": "3.0"}
        with ControlConnection(over_unix(path), "peer") as connection:
            status, said = connection.request("POST", f"/v1/{room}", msgspec.msgpack.encode(asked), timeout_s=20.0)
    fault = msgspec.msgpack.decode(said)
    assert (status, fault["hint"]) == (426, UPGRADE_HINT)
    assert fault["error"].startswith(f"reader ['m'] speaks protocol 3.0, this member speaks {PROTOCOL}")


@pytest.fixture
def newer_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make members of this process respond as members of the next major version may."""
    send = peer_server._send

    def newer_answer(exchange: ServerExchange, code: int, value: Any) -> None:
        if isinstance(value, Lease | MemberSession):
            value = {"protocol": "3.0", "lease": ["of another shape"], "session": ["too"]}
        send(exchange, code, value)

    monkeypatch.setattr(peer_server, "_send", newer_answer)


@pytest.mark.usefixtures("newer_members")
def test_fetch_error_names_incompatible_holder(hub: str, small_checkpoint, expected_tensors) -> None:
    refusal = f"member {MEMBER} speaks protocol 3.0, this process speaks {PROTOCOL}"
    found: dict[str, torch.Tensor] = {}
    with ps.join("m", connection=hub) as holder, ps.join("m", connection=hub) as reader:
        holder.fetch({}, fallback=small_checkpoint)
        with pytest.raises(PlanError, match=refusal):
            reader.fetch({}, timeout_s=20.0)
        # With a fallback, storage is read instead and the report says why.
        report = reader.fetch(found, fallback=small_checkpoint)
    assert_same(found, expected_tensors)
    assert report.storage_bytes == report.nbytes and re.search(refusal, str(report.faults))


@pytest.mark.usefixtures("newer_members")
def test_attach_error_names_incompatible_cache(hub: str, small_checkpoint) -> None:
    keeper = ps.cache.WeightCache(connection=hub).open()
    try:
        keeper.keep("m", small_checkpoint)
        with pytest.raises(PlanError, match=f"member {MEMBER} speaks protocol 3.0, this process speaks {PROTOCOL}"):
            ps.cache.attach("m", connection=hub)
    finally:
        # The error is immediate, because the reader did not understand the cache's lease.
        keeper.leave(0.0)


@pytest.mark.usefixtures("newer_members")
def test_update_error_names_incompatible_publisher(hub: str) -> None:
    weights = {"w": torch.zeros(8)}
    with (
        ps.publisher("policy", {"w": torch.ones(8)}, mode="snapshot", connection=hub) as publisher,
        ps.subscriber("policy", weights, connection=hub) as subscriber,
    ):
        publisher.publish(1)
        with pytest.raises(PenstockError, match=f"member {MEMBER} speaks protocol 3.0, this process speaks {PROTOCOL}"):
            subscriber.update()
    assert not weights["w"].any()
