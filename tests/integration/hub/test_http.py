"""The hub over HTTP: refusals, limits, TLS, metrics, and requests from hostile callers."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx
import schemathesis
from hypothesis import settings
from schemathesis.checks import CHECKS
from tests.support.authority import Authority
from tests.support.hubs import IDENTITY, key_state

from penstock.errors import ConfigError, HubUnavailable, PermissionDenied, PlanError, UnknownMember
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, ClaimRequest, Drain, FaultReport, Hello, UpstreamsRequest, WhyRequest
from penstock_hub.app import MAX_BODY_BYTES, create_app
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN = "all-models-0123456789"
LLAMA = "llama-only-0123456789"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


def hello(member: str) -> Hello:
    return Hello(member=member, host="h", doors=("unix:///d",))


@pytest.fixture
def serve(guarded):
    running = []

    def start(listen: str = "", auth: Auth | None = None) -> str:
        auth = auth or guarded
        hub = HubThread(Directory(MemoryStore(), fresh=True), bind(listen or "127.0.0.1:0", auth), auth)
        running.append(hub)
        hub.start()
        return hub.url

    yield start
    for hub in running:
        hub.stop()


@pytest.fixture
def guarded(tmp_path) -> Auth:
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN}\n{LLAMA} llama*\n")
    return Auth.of(token_file=file)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "unix"])
def test_every_hub_request_is_served_over_each_socket_type(serve, tmp_path, listen) -> None:
    if listen.startswith("[") and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    url = serve(f"unix://{tmp_path}/hub.sock" if listen == "unix" else listen)
    with HubClient.connect(url, TOKEN) as w, HubClient.connect(url, TOKEN) as hub:
        a = hub.member
        welcome = w.hello(hello(w.member))
        assert len(welcome.grant_key) == 32 and 1.5 <= welcome.beat_s <= 2.0
        hub.hello(hello(a))
        w.beat(w.member, Beat(holdings=(key_state(((0, 100),)),)))
        reply = hub.upstreams(UpstreamsRequest(member=a, holding=key_state()))
        assert [upstream.member for upstream in reply.upstreams] == [w.member]
        assert hub.claim(ClaimRequest(member=a, holding=key_state())).ranges == ()
        hub.complain(FaultReport(member=a, of=w.member, key=IDENTITY.key(), fault="stalled", detail="é"))
        # A snapshot that was slow to make, as on a busy machine, is used for a moment longer.
        deadline = time.monotonic() + 20
        while not (ranges := hub.claim(ClaimRequest(member=a, holding=key_state())).ranges):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranges == ((0, 25),)
        assert {member.member for member in hub.status("llama").members} == {a, w.member}
        assert hub.why(WhyRequest(model="llama")).lines
        hub.leave(a)
        with pytest.raises(UnknownMember):
            hub.beat(a, Beat())
        with pytest.raises(PlanError):
            w.beat(w.member, Beat(holdings=(key_state(((5, 4),)),)))
        with pytest.raises(PermissionDenied):
            hub.hello(hello(a))
    with pytest.raises(HubUnavailable, match="closed"):
        hub.status()


def test_missing_or_wrong_token_is_refused(serve, guarded, caplog) -> None:
    url = serve(auth=guarded)
    for token in (None, "wrong-token-0123456789", TOKEN + "x", TOKEN[:-1]):
        with HubClient.connect(url, token) as hub, pytest.raises(PermissionDenied, match="token"):
            hub.hello(hello(hub.member))
    assert "event=unauthorized path='/v1/hello'" in caplog.text
    assert httpx.get(f"{url}/metrics", timeout=5).status_code == 401
    assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
    with HubClient.connect(url, TOKEN) as hub:
        hub.hello(hello(hub.member))


def test_only_operator_drains_members(serve, tmp_path, caplog) -> None:
    operator = "operator-0123456789"
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{operator} @operator\n")
    url = serve(auth=Auth.of(token_file=tmp_path / "tokens"))
    order = Drain(by="somebody else", reason="maintenance")
    with HubClient.connect(url, TOKEN) as member, HubClient.connect(url, operator) as asks:
        member.hello(hello(member.member))
        assert member.beat(member.member, Beat()).drain is None
        with pytest.raises(PermissionDenied, match="operator"):
            member.drain(member.member, order)
        assert not member.status().may_drain and asks.status().may_drain
        # A browser sends this for a page on another site. The hub's own page cannot set the token so.
        foreign = {"authorization": f"Bearer {operator}", "sec-fetch-site": "cross-site"}
        answer = httpx.put(f"{url}/v1/drains/{member.member}", json={}, headers=foreign, timeout=5)
        assert answer.status_code == 403
        preflight = {"origin": "https://elsewhere", "access-control-request-method": "PUT"}
        answer = httpx.options(f"{url}/v1/drains/{member.member}", headers=preflight, timeout=5)
        assert answer.status_code == 401 and "access-control-allow-origin" not in answer.headers
        assert member.status().members[0].drain is None
        asks.drain(member.member, order)
        drain = member.beat(member.member, Beat()).drain
        assert drain is not None and drain.reason == "maintenance" and drain.by.startswith("token:")
        asks.drain(member.member, None)
        assert member.beat(member.member, Beat()).drain is None
        with pytest.raises(UnknownMember):
            asks.drain("f" * 32, order)
    assert f"event=drain member={member.member}" in caplog.text
    assert "event=forbidden operation=drain site='cross-site'" in caplog.text


def test_member_requests_from_another_process_are_rejected(serve, guarded, caplog) -> None:
    url = serve(auth=guarded)
    with HubClient.connect(url, TOKEN) as member, HubClient.connect(url, TOKEN) as other:
        other.hello(hello(other.member))
        of = member.member
        for turn in range(2):  # before and after the hub knows the member
            for send in (
                lambda: other.hello(hello(of)),
                lambda: other.beat(of, Beat()),
                lambda: other.leave(of),
                lambda: other.upstreams(UpstreamsRequest(member=of, holding=key_state())),
                lambda: other.claim(ClaimRequest(member=of, holding=key_state())),
                lambda: other.complain(
                    FaultReport(member=of, of=other.member, key=IDENTITY.key(), fault="wrong bytes")
                ),
            ):
                with pytest.raises(PermissionDenied, match="not member"):
                    send()
            if not turn:
                member.hello(hello(of))
        member.beat(of, Beat())
    assert caplog.text.count(f"event=impostor path='/v1/members/{of}' member={of}") == 4
    answer = httpx.delete(f"{url}/v1/members/{of}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=5)
    assert answer.status_code == 403


def test_limited_token_lists_only_its_models(serve, guarded) -> None:
    url = serve(auth=guarded)
    other = msgspec.structs.replace(IDENTITY, model="qwen")
    with HubClient.connect(url, LLAMA) as hub:
        hub.hello(hello(hub.member))
        hub.upstreams(UpstreamsRequest(member=hub.member, holding=key_state()))
        for send in (
            lambda: hub.upstreams(UpstreamsRequest(member=hub.member, holding=key_state(identity=other))),
            lambda: hub.claim(ClaimRequest(member=hub.member, holding=key_state(identity=other))),
            lambda: hub.beat(hub.member, Beat(holdings=(key_state(), key_state(identity=other)))),
            lambda: hub.status("qwen"),
            lambda: hub.status(),
            lambda: hub.why(WhyRequest(model="qwen")),
        ):
            with pytest.raises(PermissionDenied):
                send()
        assert hub.status("llama").members


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_unauthenticated_public_address_raises_config_error(listen, guarded) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        bind(listen, Auth())
    if listen == "0.0.0.0:0":
        bind(listen, guarded).close()


@pytest.mark.parametrize("listen", ["here", "127.0.0.1", ":1", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_invalid_listen_address_is_rejected(listen, guarded) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(listen, guarded)


def test_error_for_too_large_port_states_valid_range(guarded) -> None:
    with pytest.raises(ConfigError, match="65536") as caught:
        bind("127.0.0.1:65536", guarded)
    assert caught.value.hint == "use a port from 0 to 65535"


def test_only_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    listen = f"unix://{tmp_path}/hub.sock"
    first = bind(listen, Auth())
    assert (tmp_path / "hub.sock").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="in use"):
        bind(listen, Auth())
    first.close()
    bind(listen, Auth()).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="in use"):
        bind(f"unix://{tmp_path}/file", Auth())


def test_request_bodies_are_limited_and_validated(serve) -> None:
    url = serve()
    with httpx.Client(base_url=url, timeout=20, headers=AUTHORIZED) as http:
        big = http.post("/v1/hello", content=b" " * (MAX_BODY_BYTES + 1))
        assert big.status_code == 413 and "bytes" in big.json()["error"]
        for body in (
            b"",
            b"{",
            b"[]",
            b'{"member": "a", "protocol": "2.0"}',
            b"\xff\xfe",
            b'{"member":' * 3000,
            b"[" * 100_000,
        ):
            answer = http.post("/v1/hello", content=body)
            assert answer.status_code == 422 and set(answer.json()) == {"error", "hint", "alternatives"}
        for name in ("a\n", "a\r", "a b"):  # each audit record is one line
            answer = http.post("/v1/hello", content=msgspec.json.encode(hello(name)))
            assert answer.status_code == 422, name
        assert http.put("/v1/members/a%2Fb", content=b"{}").status_code in {404, 422}
        assert http.put("/v1/members/%C3%A9", content=b"{}").status_code == 422
        assert http.get("/v1/status", params={"model": "x" * 300}).status_code == 422


def test_unknown_path_and_method_are_refused(serve) -> None:
    member = "0" * 32
    with httpx.Client(base_url=serve(), timeout=20, headers=AUTHORIZED) as http:
        unknown = http.get("/nothing")
        assert unknown.status_code == 404
        assert unknown.json() == {"error": "Not Found", "hint": "", "alternatives": []}
        for method, path, allowed in (
            ("DELETE", "/v1/hello", "POST"),
            ("POST", f"/v1/members/{member}", "DELETE, PUT"),
            ("POST", "/v1/status", "GET, HEAD"),
            ("HEAD", "/healthz", "GET"),
        ):
            answer = http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert method == "HEAD" or answer.json()["error"] == "Method Not Allowed"
        whole, head = http.get("/openapi.json"), http.head("/openapi.json")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        slash = http.get("/v1/status/?model=llama")
        assert (slash.status_code, slash.headers["location"]) == (307, f"{http.base_url}/v1/status?model=llama")


def test_internal_hub_error_returns_500(guarded, monkeypatch, caplog) -> None:
    directory = Directory(MemoryStore(), fresh=True)
    hub = HubThread(directory, bind("127.0.0.1:0", guarded), guarded)
    hub.start()
    try:
        monkeypatch.setattr(directory, "status", lambda *_: [][0])
        answer = httpx.get(f"{hub.url}/v1/status", timeout=20, headers=AUTHORIZED)
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        # Use another connection, because the hub closes the one whose request failed.
        assert httpx.get(f"{hub.url}/healthz", timeout=20).status_code == 200
    finally:
        hub.stop()
    assert "the hub failed at GET '/v1/status'" in caplog.text and "IndexError" in caplog.text


def test_hub_metrics_count_each_event(serve) -> None:
    url = serve()
    clients = [HubClient.connect(url, TOKEN) for _ in range(3)]
    with clients[0] as w, clients[1] as a, clients[2] as x:
        for hub in (w, a):
            hub.hello(hello(hub.member))
        w.beat(w.member, Beat(holdings=(key_state(((0, 100),)),)))
        a.upstreams(UpstreamsRequest(member=a.member, holding=key_state(claims=((3, 5),))))
        with pytest.raises(UnknownMember):
            x.beat(x.member, Beat())
    assert httpx.get(f"{url}/readyz", timeout=5).text == "ok\n"
    page = httpx.get(f"{url}/metrics", timeout=5, headers=AUTHORIZED).text.splitlines()
    assert "penstock_hub_members 2.0" in page
    assert 'penstock_hub_holdings{model="llama",state="whole"} 1.0' in page
    assert 'penstock_hub_claims{model="llama"} 2.0' in page
    assert "penstock_hub_grants_total 1.0" in page
    assert 'penstock_hub_refusals_total{status="410"} 1.0' in page
    assert 'penstock_hub_request_seconds_count{operation="flight"} 1.0' in page


def test_unreachable_hub_or_invalid_url_raises(serve, tmp_path) -> None:
    with HubClient.connect(f"unix://{tmp_path}/none.sock", timeout_s=0.3) as hub, pytest.raises(HubUnavailable):
        hub.status()
    for url in ("hub:7070", "", "ftp://hub"):
        with pytest.raises(ConfigError):
            HubClient.connect(url)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with HubClient.connect(url, timeout_s=0.5) as hub, pytest.raises(HubUnavailable, match=r"0.5 s"):
            hub.status()


def test_mutual_tls_checks_both_certificates(serve, guarded, tmp_path, monkeypatch) -> None:
    authority = Authority(tmp_path)
    ca_file, certificate, key = authority.ca_file, *authority.sign("hub")
    member, stranger = authority.sign("member"), authority.stranger("stranger")
    auth = Auth.of(certificate=certificate, private_key=key, client_ca=ca_file)
    assert auth.guards
    url = serve(auth=auth)
    assert url.startswith("https://")

    with HubClient.connect(url, ca_file=ca_file, certificate=member) as hub:
        hub.hello(hello(hub.member))
    with monkeypatch.context() as environment:
        environment.setenv("PENSTOCK_CA_FILE", str(ca_file))
        environment.setenv("PENSTOCK_CERT_FILE", str(member[0]))
        environment.setenv("PENSTOCK_KEY_FILE", str(member[1]))
        with HubClient.connect(url) as hub:
            hub.hello(hello(hub.member))
    for shown in (None, stranger):
        hub = HubClient.connect(url, ca_file=ca_file, certificate=shown, timeout_s=1)
        with hub, pytest.raises(HubUnavailable):
            hub.hello(hello(hub.member))
    with (
        HubClient.connect(url, certificate=member, timeout_s=10) as hub,
        pytest.raises(HubUnavailable, match="does not verify") as unverified,
    ):
        hub.hello(hello(hub.member))
    assert "PENSTOCK_CA_FILE" in str(unverified.value.hint)
    with pytest.raises(ConfigError, match="certificate"):
        serve(auth=msgspec.structs.replace(guarded, certificate=ca_file, private_key=key))


_schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(Directory(MemoryStore(), fresh=True)))
# Unknown members are refused although the schema allows them, and 1.0 is no integer here though JSON Schema says so.
_NOT_CHECKED = CHECKS.get_by_names(["positive_data_acceptance"])


@_schema.parametrize()
@settings(max_examples=40, deadline=None)
def test_hostile_requests_return_documented_status(case) -> None:
    case.call_and_validate(excluded_checks=_NOT_CHECKED)
