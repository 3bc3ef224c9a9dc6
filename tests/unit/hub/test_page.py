"""The fleet page: the changes that a viewer receives, the rows that a limited token sees, and the static files."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("starlette")
import uvicorn

from penstock.errors import HubUnavailable, PermissionDenied
from penstock.hub.auth import Caller
from penstock.hub.client import HubClient
from penstock.hub.job_state import JobState, WorkerState
from penstock.hub.messages import (
    Beat,
    FaultReport,
    FleetFailure,
    Hello,
    HoldingState,
    Identity,
    JobStatus,
    MemberStatus,
    Status,
    SyncState,
)
from penstock_hub import page
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.page import FleetFeed, row_of, shares, totals
from penstock_hub.routes import HubApp
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN, LIMITED = "a-token-of-this-hub", "a-token-for-one-model"
ALL = Caller()


def member(name: str, *, model: str = "llama", have: tuple[tuple[int, int], ...] = (), state="filling", **more):
    holding = HoldingState(
        key="0" * 32, identity=Identity(model=model), num_chunks=10, nbytes=1000, have=have, state=state, **more
    )
    return MemberStatus(
        member=name, name="w", host="h", rack="", doors=(), age_s=1.0, silent_s=0.1, holdings=(holding,)
    )


class Fleet:
    """A status and a clock that a test changes."""

    def __init__(self) -> None:
        self.members: dict[str, MemberStatus] = {}
        self.now_s = 0.0
        self.feed = FleetFeed(lambda: Status(members=tuple(self.members.values())), clock=lambda: self.now_s)

    def read(self, cursor: str = "", caller: Caller = ALL) -> tuple[str, dict | None]:
        self.now_s += 10
        self.feed.refresh()
        present, message = self.feed.changes(cursor, caller)
        return present, json.loads(message) if message else None


def test_path_text_is_parsed_into_percent_transport_and_source() -> None:
    assert shares("75% shm <- 3f9c02ab, 25% storage s3://b/m/") == [
        {"percent": 75, "transport": "shm", "source": "3f9c02ab"},
        {"percent": 25, "transport": "storage", "source": "s3://b/m/"},
    ]
    assert shares("") == []


def test_page_viewer_receives_full_state_then_changes() -> None:
    fleet = Fleet()
    fleet.members = {"a": member("a"), "b": member("b", have=((0, 5),))}
    cursor, message = fleet.read()
    assert message is not None and message["full"] and [row["id"] for row in message["rows"]] == ["a", "b"]
    assert fleet.read(cursor) == (cursor, None)
    fleet.members["b"] = member("b", have=((0, 10),))
    later, message = fleet.read(cursor)
    assert message is not None and not message["full"]
    assert [(row["id"], row["holdings"][0]["share"]) for row in message["rows"]] == [("b", 1.0)]
    del fleet.members["a"]
    _, message = fleet.read(later)
    assert message is not None and (message["rows"], message["gone"]) == ([], ["a"])


def test_elapsed_time_alone_does_not_change_page_row() -> None:
    first = member("a")
    second = MemberStatus(**{name: getattr(first, name) for name in first.__struct_fields__} | {"age_s": 9.0})
    assert row_of(first) == row_of(second)


def test_cursor_from_another_hub_returns_full_state() -> None:
    first, second = Fleet(), Fleet()
    for fleet in (first, second):
        fleet.members = {"a": member("a")}
    cursor, _ = first.read()
    second.read()
    second.members["b"] = member("b")
    _, message = second.read(cursor)
    assert message is not None and message["full"] and len(message["rows"]) == 2


def test_viewer_that_missed_departures_receives_full_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_GONE", 2)
    fleet = Fleet()
    fleet.members = {name: member(name) for name in "abcd"}
    cursor, _ = fleet.read()
    for name in "abc":
        del fleet.members[name]
        fleet.read()
    _, message = fleet.read(cursor)
    assert message is not None and message["full"] and [row["id"] for row in message["rows"]] == ["d"]


def test_limited_page_viewer_receives_only_permitted_models() -> None:
    fleet = Fleet()
    limited = Caller(models=("llama",))
    fleet.members = {"a": member("a"), "b": member("b", model="secret")}
    cursor, message = fleet.read("", limited)
    assert message is not None and [row["id"] for row in message["rows"]] == ["a"]
    assert "totals" not in message and "secret" not in json.dumps(message)
    # A row that becomes hidden is removed, and hidden rows are never mentioned.
    fleet.members = {"a": member("a", model="secret")}
    _, message = fleet.read(cursor, limited)
    assert message is not None and message["full"] and (message["rows"], message["gone"]) == ([], [])


def test_change_to_hidden_model_sends_no_event() -> None:
    fleet = Fleet()
    limited = Caller(models=("llama",))
    fleet.members = {"a": member("a"), "b": member("b", model="secret")}
    cursor, _ = fleet.read("", limited)
    fleet.members["b"] = member("b", model="secret", have=((0, 5),))
    fleet.members["c"] = member("c", model="secret")
    assert fleet.read(cursor, limited) == (cursor, None)
    fleet.members["a"] = member("a", have=((0, 5),))
    later, message = fleet.read(cursor, limited)
    assert later != cursor and message is not None and [row["id"] for row in message["rows"]] == ["a"]


def test_limited_viewer_sees_no_complaints_about_hidden_weights() -> None:
    fleet = Fleet()
    both = msgspec.structs.replace(member("a"), complaints=3)
    fleet.members = {"a": msgspec.structs.replace(both, holdings=(*both.holdings, *member("a", model="s").holdings))}
    _, message = fleet.read("", Caller(models=("llama",)))
    assert message is not None and message["rows"][0]["complaints"] == 0


def test_bytes_from_peers_count_as_saved_reads() -> None:
    rows = {
        "a": row_of(member("a", state="whole", path="100% storage /m")),
        "b": row_of(member("b", have=((0, 5),), path="80% shm <- aaaaaaaa, 20% storage /m", gb_per_s=1.5)),
    }
    assert totals(rows) == {"members": 2, "held_bytes": 1500, "gb_per_s": 1.5, "saved_bytes": 400}


def job(name: str, **more) -> JobStatus:
    state = JobState(
        name=name, operation="cast", sources=("s3://b/m",), destination=f"/out/{name}", process="h:1", phase="running",
        num_tasks=4, **more,
    )  # fmt: skip
    return JobStatus(job=name[0] * 32, age_s=3.0, silent_s=0.1, state=state)


def test_job_changes_are_sent_only_to_permitted_viewers() -> None:
    late = WorkerState(worker="w0", device="cpu", num_tasks=2, state="running", task=1, task_s=9.0, expected_s=1.0)
    failure = FleetFailure(
        age_s=60.0, verb="fetch", model="secret", error="NotFound", message="no holder", blame="source",
        member="a" * 32, name="h:1", host="h",
    )  # fmt: skip
    shown = {"jobs": (job("llama", num_done=1, workers=(late,)), job("secret")), "failures": (failure,)}
    now_s = [0.0]
    feed = FleetFeed(lambda: Status(**shown), clock=lambda: now_s[0])

    def read(cursor: str, caller: Caller) -> tuple[str, dict | None]:
        now_s[0] += 10
        feed.refresh()
        present, message = feed.changes(cursor, caller)
        return present, json.loads(message) if message else None

    cursor, message = read("", ALL)
    assert message is not None and [row["name"] for row in message["jobs"]] == ["llama", "secret"]
    assert message["jobs"][0]["workers"][0]["is_late"] and not message["jobs"][0]["silent"]
    assert (message["failures"][0]["error"], message["failures"][0]["blame"]) == ("NotFound", "source")
    assert read(cursor, ALL) == (cursor, None)
    shown["jobs"] = (job("llama", num_done=2), job("secret"))
    _, message = read(cursor, ALL)
    assert message is not None and message["jobs"][0]["num_done"] == 2
    _, message = read("", Caller(models=("llama",)))
    assert message is not None and "secret" not in json.dumps(message) and len(message["jobs"]) == 1


@pytest.mark.parametrize("is_operator", [True, False])
def test_page_shows_whether_caller_can_drain(is_operator: bool) -> None:
    fleet = Fleet()
    fleet.members = {"a": member("a")}
    _, message = fleet.read("", Caller(is_operator=is_operator))
    assert message is not None and message["may_drain"] is is_operator


def test_page_row_shows_sync_version() -> None:
    state = SyncState(name="policy", side="subscriber", version=7, rank=1, world_size=2)
    known = MemberStatus(
        member="a", name="", host="h", rack="", doors=(), age_s=0, silent_s=9.0, holdings=(), syncs=(state,)
    )
    row = row_of(known)
    assert row["silent"] and row["syncs"][0]["version"] == 7


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubThread]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n{LIMITED} llama*\n")
    auth = Auth.of(token_file=tokens)
    thread = HubThread(Directory(MemoryStore()), bind("127.0.0.1:0", auth), auth)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def get(hub: HubThread) -> Iterator[Callable[..., http.client.HTTPResponse]]:
    """Request a path on a new connection, with or without a token."""
    with ExitStack() as stack:

        def get(path: str, token: str = "") -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
            stack.callback(connection.close)
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            stack.callback(answer.close)
            return answer

        yield get


def test_static_files_are_served_without_token(get) -> None:
    for path in (
        "/",
        "/assets/app.js",
        "/assets/pictures.js",
        "/assets/members.js",
        "/assets/format.js",
        "/assets/style.css",
        "/assets/icon.svg",
    ):
        answer = get(path)
        assert answer.status == 200
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        text = answer.read().decode()
        # A browser does not load a namespace's address.
        assert not re.search(r"(?:src|href|url\(|fetch\()=?[\"'`]?(?:https?:)?//", text)


def test_unknown_asset_returns_404(get) -> None:
    for path in ("/assets/index.html", "/assets/..%2f__init__.py", "/assets/nothing"):
        assert get(path).status == 404


def test_event_stream_requires_token(get) -> None:
    assert get("/v1/events").status == 401
    assert get("/v1/events", "a-token-of-another-hub").status == 401
    assert get("/v1/events?since=x", TOKEN).status == 422
    for token in (TOKEN, LIMITED):
        answer = get("/v1/events", token)
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream; charset=utf-8")


class _Away(FleetFeed):
    """The status cannot be read while Redis or the hub behind `penstock ui` is unavailable."""

    def refresh(self) -> None:
        raise HubUnavailable("the store does not answer")


def test_unavailable_store_is_reported_in_event_stream() -> None:
    app = HubApp()
    page.add_page(app, _Away(Status), lambda request: ALL)
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        connection = http.client.HTTPConnection(*bound.getsockname(), timeout=10)
        connection.request("GET", "/v1/events")
        with contextlib.closing(connection), connection.getresponse() as answer:
            assert answer.status == 200
            assert json.loads(answer.readline().removeprefix(b"data: ")) == {"error": "the store does not answer"}
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def test_event_streams_per_token_are_limited(get, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = [get("/v1/events", LIMITED) for _ in range(page.MAX_VIEWERS + 1)]
    assert [answer.status for answer in flood] == [200] * page.MAX_VIEWERS + [503]
    others = [get("/v1/events", TOKEN) for _ in range(page.MAX_VIEWERS // 2)]
    assert [answer.status for answer in others] == [200] * len(others)
    # The displaced streams end.
    assert flood[0].read().endswith(b"\n\n")
    assert [get("/v1/events", token).status for token in (TOKEN, LIMITED)] == [503, 503]


@pytest.fixture
def two_models(hub: HubThread) -> tuple[str, str]:
    """Register a holder for each token, and a holder of a model that the limited token may not access."""
    members = []
    for token, model in ((TOKEN, "secret"), (LIMITED, "llama")):
        with HubClient.connect(hub.url, token) as client:
            client.hello(Hello(member=client.member, host="h", doors=("unix:///x",)))
            identity = Identity(model=model)
            held = HoldingState(key=identity.key(), identity=identity, num_chunks=1, nbytes=1, have=((0, 1),))
            client.beat(client.member, Beat(holdings=(held,)))
            members.append(client.member)
    return members[0], members[1]


def test_metrics_for_limited_token_show_only_its_models(get, two_models) -> None:
    text = get("/metrics", LIMITED).read().decode()
    assert 'model="llama"' in text and "secret" not in text
    assert "penstock_hub_members 1.0" in text
    assert not re.search(r"hellos|grants|request_seconds|refusals|complaints", text)
    everything = get("/metrics", TOKEN).read().decode()
    assert 'model="secret"' in everything and "penstock_hub_members 2.0" in everything
    assert "penstock_hub_hellos_total 2.0" in everything and "request_seconds" in everything


def test_refused_complaint_does_not_reveal_holder_of_hidden_model(hub: HubThread, two_models) -> None:
    holder, _ = two_models
    key = Identity(model="secret").key()
    with HubClient.connect(hub.url, LIMITED) as client, HubClient.connect(hub.url, TOKEN) as all_models:
        client.hello(Hello(member=client.member, host="h", doors=("unix:///x",)))
        refusals = []
        for of in (holder, "f" * 32):
            with pytest.raises(PermissionDenied) as caught:
                client.complain(FaultReport(member=client.member, of=of, key=key, fault="unreachable"))
            refusals.append(str(caught.value))
        assert refusals[0] == refusals[1] and "secret" not in refusals[0]
        assert not any(member.complaints for member in all_models.status().members)
