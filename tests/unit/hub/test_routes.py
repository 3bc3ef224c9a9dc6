"""Routes of the hub's app: selection of the handler, and responses to errors."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import HubUnavailable, PenstockError, PermissionDenied, PlanError, SourceBusy, UnknownMember
from penstock.hub.messages import Fault
from penstock_hub.routes import HubApp, RouteRefused

COUNTED: list[int] = []


@pytest.fixture
def app() -> HubApp:
    COUNTED.clear()

    async def read(request: Request) -> Response:
        return Response(f"read {request.path_params}", media_type="text/plain")

    async def write(request: Request) -> Response:
        return Response(f"write {request.path_params}", media_type="text/plain")

    app = HubApp(count_refusal=COUNTED.append)
    app.add_route("/", read, "GET")
    app.add_route("/v1/status", read, "GET", "HEAD")
    app.add_route("/v1/members/{member}", write, "PUT")
    app.add_route("/v1/members/{member}", read, "DELETE")
    return app


def call_app(app: HubApp, method: str, path: str, sent: list[Any] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body. `sent` receives the messages even if the app raises."""
    sent = [] if sent is None else sent

    async def receive() -> Any:
        # The caller sends nothing more and stays connected.
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"hub:1")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"a=b", "headers": headers}
    asyncio.run(app({**scope, "scheme": "http", "server": ("hub", 1)}, receive, send))
    start = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], start, b"".join(message["body"] for message in sent[1:])


def fails(error: Exception) -> HubApp:
    async def fail(_: Request) -> Response:
        raise error

    COUNTED.clear()
    app = HubApp(count_refusal=COUNTED.append)
    app.add_route("/", fail, "GET")
    return app


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("GET", "/", b"read {}"),
        ("GET", "/v1/status", b"read {}"),
        ("HEAD", "/v1/status", b"read {}"),
        ("PUT", "/v1/members/m", b"write {'member': 'm'}"),
        ("DELETE", "/v1/members/a b\n", b"read {'member': 'a b\\n'}"),
    ],
)
def test_method_and_path_select_handler(app, method, path, answer) -> None:
    assert call_app(app, method, path) == (
        200,
        {"content-length": str(len(answer)), "content-type": "text/plain; charset=utf-8"},
        answer,
    )


@pytest.mark.parametrize("path", ["", "//", "/v1", "/V1/status", "/v1/members", "/v1/members/", "/v1/members/a/b"])
def test_unknown_path_returns_404(app, path) -> None:
    status, headers, body = call_app(app, "GET", path)
    assert (status, headers["content-type"], COUNTED) == (404, "application/json", [404])
    assert msgspec.json.decode(body, type=Fault) == Fault(error="Not Found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/", "GET"),
        ("OPTIONS", "/v1/status", "GET, HEAD"),
        ("get", "/v1/status", "GET, HEAD"),
        ("GET", "/v1/members/m", "DELETE, PUT"),
    ],
)
def test_unsupported_method_returns_405_with_allow(app, method, path, allowed) -> None:
    status, headers, body = call_app(app, method, path)
    assert (status, headers["allow"], COUNTED) == (405, allowed, [405])
    assert msgspec.json.decode(body, type=Fault) == Fault(error="Method Not Allowed")


def test_trailing_slash_is_redirected(app) -> None:
    for method in ("GET", "POST"):
        status, headers, body = call_app(app, method, "/v1/status//")
        assert (status, headers["location"], body) == (307, "http://hub:1/v1/status?a=b", b"")
    assert call_app(app, "PUT", "/v1/members/m/")[1]["location"] == "http://hub:1/v1/members/m?a=b"
    assert not COUNTED


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (RouteRefused(401, "no token", "give one"), 401, ("www-authenticate", "Bearer")),
        (RouteRefused(413, "too large", "give one"), 413, None),
        (UnknownMember("m", hint="give one"), 410, None),
        (PermissionDenied("m", hint="give one"), 403, None),
        (PlanError("m", hint="give one"), 409, None),
        (SourceBusy("m", hint="give one"), 429, None),
        (HubUnavailable("m", hint="give one"), 503, ("retry-after", "1")),
        (PenstockError("m", hint="give one"), 500, None),
    ],
)
def test_handler_error_returns_matching_status_and_is_counted(error, status, header) -> None:
    shown, headers, body = call_app(fails(error), "GET", "/")
    assert (shown, COUNTED) == (status, [status])
    fault = msgspec.json.decode(body, type=Fault)
    assert fault.error and fault.hint == "give one"
    assert set(headers.items()) - {("content-length", str(len(body))), ("content-type", "application/json")} == (
        {header} if header else set()
    )


def test_unexpected_exception_returns_500_and_is_reraised() -> None:
    sent: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        call_app(fails(ZeroDivisionError("secret")), "GET", "/", sent)
    assert (sent[0]["status"], sent[1]["body"]) == (500, b"Internal Server Error")
    assert (b"content-type", b"text/plain; charset=utf-8") in sent[0]["headers"]
    assert not COUNTED


@pytest.mark.parametrize("error", [HubUnavailable("away"), ZeroDivisionError(), ClientDisconnect()])
def test_error_after_response_start_sends_no_second_response(error, caplog) -> None:
    async def parts():
        yield b"part"
        raise error

    async def stream(_: Request) -> Response:
        return StreamingResponse(parts())

    app, sent = HubApp(), list[Any]()
    app.add_route("/", stream, "GET")
    with pytest.raises(BaseException):  # noqa: B017 (older releases of Starlette raise an exception group)
        call_app(app, "GET", "/", sent)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    # A disconnected caller is not an error of the hub.
    assert ("the hub failed in the answer to GET '/'" in caplog.text) == (not isinstance(error, ClientDisconnect))


def test_lifespan_events_enter_and_exit_context() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: object):
        events.append("begins")
        yield
        events.append("ends")

    async def send(message: Any) -> None:
        events.append(message["type"])

    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    asyncio.run(HubApp(lifespan)({"type": "lifespan", "state": {}}, receive, send))
    assert events == ["begins", "lifespan.startup.complete", "ends", "lifespan.shutdown.complete"]
