"""The hub over HTTP: its operations, a `Directory` as an ASGI app, and the OpenAPI document.

`OPERATIONS` is the single list of the hub's requests. The app creates its routes from this list, and the OpenAPI
document creates its paths from it. Bodies are JSON encodings of `messages`, which msgspec decodes with limits. The body
of an error response is a `Fault`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import MALFORMED, HubUnavailable
from penstock.hub import messages
from penstock.hub.auth import LIFE_HEADER, OPERATOR, Caller, member_of
from penstock.hub.job_state import JobState
from penstock.logs import log_named
from penstock.units import MIB
from penstock_hub.audit import CALLER, stranger
from penstock_hub.auth import CERTIFICATE, Auth
from penstock_hub.connection import UNAUTHORIZED
from penstock_hub.directory import Directory
from penstock_hub.metrics import Metrics
from penstock_hub.page import FleetFeed, add_page, keep_sampling
from penstock_hub.routes import Handler, HubApp, Lifespan, RouteRefused
from penstock_hub.store import MemoryStore

MAX_BODY_BYTES = 8 * MIB
"""Enough for a heartbeat with 1,024 holdings of a few hundred ranges each, which takes tens of milliseconds to
decode."""
BODY_S = 20.0
"""Seconds within which a body must arrive."""
_ANNOUNCED = msgspec.json.Decoder(messages.AnnouncedVersion)
_log = log_named("penstock.hub")
audit = log_named("penstock.audit")

FAULTS = {
    400: "the caller speaks another major version of the protocol",
    401: "the token is missing, or this hub does not accept it",
    403: "the caller has no right to this, or the member belongs to another process",
    409: "the holding contradicts itself",
    410: "the hub does not know the member, which must register again (hello)",
    413: "the body is too large",
    422: "the body or a parameter does not match the schema",
    429: "this caller sends too many of these requests",
    503: "the hub's store does not answer",
}


class HubOperation(msgspec.Struct, frozen=True):
    """An operation of the hub, with its method, path, message types and implementation."""

    name: str
    method: str
    path: str
    about: str
    request_type: type | None
    reply_type: type | None
    perform: Callable[[Directory, str, Any, Caller], Any]
    """Called with the directory, the parameter from the path or query, the body and the caller."""
    speaker: Callable[[str, Any], str] | None = None
    """Returns the member for which the caller speaks. The caller must send this member's secret."""
    models: Callable[[Any], Iterable[str]] = lambda _: ()
    """Returns the models that the body names. The caller's token must allow them."""
    is_for_operators: bool = False


def _in_path(parameter: str, _: Any) -> str:
    return parameter


def _in_body(_: str, body: Any) -> str:
    return str(body.member)


def _model_of(request: messages.UpstreamsRequest | messages.ClaimRequest) -> Iterable[str]:
    return (request.holding.identity.model,)


def _name_of(message: messages.SyncRequest | messages.DecideRequest | JobState) -> Iterable[str]:
    return (message.name,)


OPERATIONS = (
    HubOperation("hello", "POST", "/v1/hello", "A process joins the fleet.", messages.Hello, messages.Welcome,
        lambda directory, _, body, caller: directory.hello(body, caller), _in_body),
    HubOperation(
        "beat", "PUT", "/v1/members/{member}", "A heartbeat with the state of the member.",
        messages.Beat, messages.BeatReply,
        lambda directory, member, body, caller: directory.beat(member, body, caller), _in_path,
        lambda beat: (*(holding.identity.model for holding in beat.holdings), *(state.name for state in beat.syncs))),
    HubOperation("leave", "DELETE", "/v1/members/{member}", "A member leaves the fleet.", None, None,
        lambda directory, member, _, caller: directory.leave(member, caller), _in_path),
    HubOperation(
        "flight", "POST", "/v1/flight", "Members to read chunks from, with grants.",
        messages.UpstreamsRequest, messages.UpstreamsReply,
        lambda directory, _, body, caller: directory.upstreams(body, caller), _in_body, _model_of),
    HubOperation(
        "claim", "POST", "/v1/claim", "Chunks to read from storage.", messages.ClaimRequest, messages.ClaimReply,
        lambda directory, _, body, caller: directory.claim(body, caller), _in_body, _model_of),
    HubOperation(
        "sync", "POST", "/v1/sync", "Members of a sync, with grants.", messages.SyncRequest, messages.SyncReply,
        lambda directory, _, body, caller: directory.sync(body), _in_body, _name_of),
    HubOperation(
        "decide", "POST", "/v1/decide", "The decision on a version with a two-phase commit.", messages.DecideRequest,
        messages.DecideReply, lambda directory, _, body, caller: directory.decide(body, caller), _in_body, _name_of),
    HubOperation("complain", "POST", "/v1/complain", "Report an unusable source.", messages.FaultReport, None,
        lambda directory, _, body, caller: directory.complain(body, caller), _in_body),
    HubOperation("job", "PUT", "/v1/jobs/{member}", "The state of a conversion.", JobState, None,
        lambda directory, job, body, caller: directory.job(job, body, caller), _in_path, _name_of),
    HubOperation("drain", "PUT", "/v1/drains/{member}", "Send no more readers to a member.", messages.Drain, None,
        lambda directory, member, body, caller: directory.drain(member, body, caller), is_for_operators=True),
    HubOperation("undrain", "DELETE", "/v1/drains/{member}", "Send readers to a member again.", None, None,
        lambda directory, member, _, caller: directory.drain(member, None, caller), is_for_operators=True),
    HubOperation("status", "GET", "/v1/status", "Members and what they hold.", None, messages.Status,
        lambda directory, model, _, caller: msgspec.structs.replace(
            directory.status(model or None), may_drain=caller.is_operator)),
    HubOperation(
        "why", "POST", "/v1/why", "Reasons why members read a model from their upstreams.",
        messages.WhyRequest, messages.Why,
        lambda directory, _, body, caller: directory.why(body), models=lambda request: (request.model,)),
)  # fmt: skip


def create_app(directory: Directory, auth: Auth | None = None) -> HubApp:
    """Create the hub's app. The default authentication admits every caller, so the socket itself must be private."""
    auth = auth or Auth()
    metrics = Metrics(directory)
    feed = FleetFeed(directory.status, on_gone=directory.record_lost)

    def on_unauthorized(path: str, client: str) -> None:
        metrics.refused(401)
        CALLER.set(stranger(client))
        audit.warning("event=unauthorized path=%r client=%s", path, client)

    app = HubApp(
        _running(lambda: _renew_life(directory, auth), lambda: keep_sampling(feed)),
        count_refusal=metrics.refused,
        on_unauthorized=on_unauthorized,
    )
    for operation in OPERATIONS:
        endpoint = _endpoint(operation, directory, auth, metrics)
        methods = ("GET", "HEAD") if operation.method == "GET" else (operation.method,)
        app.add_route(operation.path, endpoint, *methods)
    _add_pages(app, directory, auth, metrics)
    add_page(app, feed, lambda request: _check_caller(request, auth))
    return app


class MemberClient(Protocol):
    """The requests that the page of `penstock ui` sends to a hub, implemented by `client.HubClient`."""

    def status(self) -> messages.Status:
        """Return the state of the fleet."""

    def drain(self, member: str, drain: messages.Drain | None) -> None:
        """Drain a member, so that it gets no more readers. If `drain` is None, end the drain."""


def create_page_app(hub: MemberClient, auth: Auth) -> HubApp:
    """Create an app that serves the fleet page and forwards its user's requests to the hub."""
    feed = FleetFeed(hub.status)
    app = HubApp(_running(lambda: keep_sampling(feed)))
    add_page(app, feed, lambda request: _check_caller(request, auth))
    app.add_route("/v1/drains/{member}", _drain_at(hub, auth), "PUT", "DELETE")
    return app


def _drain_at(hub: MemberClient, auth: Auth) -> Handler:
    """Return a handler that forwards a drain request. The hub checks the client's token."""
    decoder = msgspec.json.Decoder(messages.Drain)

    async def endpoint(request: Request) -> Response:
        _check_caller(request, auth)
        _check_site("drain", request)
        try:
            member = msgspec.convert(request.path_params["member"], messages.MemberId)
            order = decoder.decode(await _body(request)) if request.method == "PUT" else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RouteRefused(422, f"drain: {error}"[:1000]) from error
        await run_in_threadpool(hub.drain, member, order)
        return Response(status_code=204)

    return endpoint


def _running(*work: Callable[[], Coroutine[Any, Any, None]]) -> Lifespan:
    """Return a lifespan that runs these functions in the server's event loop and cancels them at shutdown."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(start()) for start in work]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return lifespan


async def _renew_life(directory: Directory, auth: Auth) -> None:
    """Renew the hub's entry in the store at each heartbeat interval, and remove the members of revoked tokens."""
    checked = auth.tokens
    while True:
        try:
            await run_in_threadpool(directory.begin)
            # Expel the members of revoked tokens. The hub would otherwise send them readers until their entries
            # expire. Reading a changed file creates a new tuple, so compare by identity.
            if (tokens := auth.tokens) is not checked:
                await run_in_threadpool(directory.expel, {caller.name for _, caller in tokens})
                checked = tokens
        except HubUnavailable as error:
            _log.warning("the store does not answer: %s", error.message)
        await asyncio.sleep(directory.beat_s)


def _add_pages(app: HubApp, directory: Directory, auth: Auth, metrics: Metrics) -> None:
    """Add `/healthz` (the process responds), `/readyz` (its store responds too), `/metrics` and `/openapi.json`."""

    # The health checks are public, because a monitor has no token. They reveal nothing about the fleet.
    async def healthz(_: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        # Read any entry. An unavailable store raises HubUnavailable, which becomes status 503.
        await run_in_threadpool(directory.store.read, "hub/life")
        return Response("ok\n", media_type="text/plain")

    async def page(request: Request) -> Response:
        # Metrics are not public, because their labels name models and a token may be limited to some models.
        caller = _check_caller(request, auth)
        return Response(await run_in_threadpool(metrics.page, caller), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return Response(_document(auth), media_type="application/json")

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", page)):
        app.add_route(path, endpoint, "GET")
    app.add_route("/openapi.json", openapi, "GET", "HEAD")


def _endpoint(operation: HubOperation, directory: Directory, auth: Auth, metrics: Metrics) -> Handler:
    # Create the decoder once, because msgspec compiles it from the message's type.
    request_type = operation.request_type
    decoder: msgspec.json.Decoder[Any] | None = None if request_type is None else msgspec.json.Decoder(request_type)
    encoder = msgspec.json.Encoder()
    # A store in memory responds in microseconds, which is less than the time to hand a request to a thread.
    blocking = not isinstance(directory.store, MemoryStore)

    async def respond(request: Request) -> Response:
        with metrics.timed(operation.name):
            caller = _check_caller(request, auth)
            # Check the version first, because every other field may have a different meaning in another major version.
            if messages.PROTOCOL_HEADER in request.headers:
                _check_version(request, request.headers[messages.PROTOCOL_HEADER], "this caller")
            if operation.is_for_operators:
                _check_operator(operation.name, request, caller)
            parameter = _parameter(operation, request)
            body = await _body(request)
            try:
                # First decode only the version, because the error must name the versions and not a field that fails to
                # decode.
                if request_type is messages.Hello:
                    announced = _ANNOUNCED.decode(body)
                    _check_version(request, announced.protocol or messages.UNANNOUNCED, f"member {announced.sender}")
                message = None if decoder is None else decoder.decode(body)
            except MALFORMED as error:
                raise RouteRefused(422, f"{operation.name}: {error}"[:1000]) from error
            _check_models(operation, caller, parameter, message)
            speaker = None if operation.speaker is None else operation.speaker(parameter, message)
            if speaker is not None:
                _check_life(request, speaker)

            # The certificate check and the operation may wait for the store, and must not block the event loop.
            def perform() -> Any:
                if speaker is not None and caller.certificate:
                    directory.check_certificate(speaker, caller.certificate)
                return operation.perform(directory, parameter, message, caller)

            reply = await run_in_threadpool(perform) if blocking else perform()
            if operation.reply_type is None:
                return Response(status_code=204)
            return Response(encoder.encode(reply), media_type="application/json")

    async def endpoint(request: Request) -> Response:
        try:
            return await respond(request)
        except asyncio.CancelledError:
            # The hub shuts down before this request has finished. Without a response uvicorn would log a traceback.
            return Response(status_code=503)

    return endpoint


def _check_version(request: Request, protocol: str, them: str) -> None:
    if fault := messages.version_fault(protocol, them, "the hub"):
        audit.warning("event=version path=%r protocol=%r client=%s", request.url.path, protocol, _client(request))
        raise RouteRefused(400, fault, messages.UPGRADE_HINT)


def _check_caller(request: Request, auth: Auth) -> Caller:
    """Authenticate the caller of a request, or refuse the request with status 401."""
    certificate = request.scope.get(CERTIFICATE, "") if auth.client_ca is not None else ""
    caller = auth.caller(request.headers.get("authorization", ""), certificate)
    CALLER.set(stranger(_client(request)) if caller is None else caller.name)
    if caller is None:
        # The token was revoked after the connection was accepted. Connections without a token are refused earlier.
        audit.warning("event=unauthorized path=%r client=%s", request.url.path, _client(request))
        raise RouteRefused(401, UNAUTHORIZED.error, UNAUTHORIZED.hint)
    return caller


def _check_operator(operation: str, request: Request, caller: Caller) -> None:
    _check_site(operation, request)
    if not caller.is_operator:
        audit.warning("event=forbidden operation=%s caller=%s", operation, caller.name)
        raise RouteRefused(
            403, "only an operator's token may drain members", f"write {OPERATOR} after the token in --token-file"
        )


def _check_site(operation: str, request: Request) -> None:
    """Refuse a request if the browser's headers say that a page from another site sent it."""
    # No cookie authenticates here, so a foreign page cannot misuse a browser's credentials. This check is an additional
    # guard.
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        audit.warning("event=forbidden operation=%s site=%r", operation, request.headers["sec-fetch-site"])
        raise RouteRefused(
            403, "a page of another site sent this request", "use the hub's own page, or `penstock drain`"
        )


def _client(request: Request) -> str:
    return request.client.host if request.client else "unix"


def _check_models(operation: HubOperation, caller: Caller, parameter: str, body: Any) -> None:
    models = tuple(operation.models(body))
    # A status request without a model requires a token for all models.
    if operation.name == "status":
        models = (parameter,)
    if not caller.may_ask(models):
        audit.warning("event=forbidden operation=%s models=%r", operation.name, ",".join(models))
        about = ", ".join(filter(None, sorted(set(models)))) or "all models"
        raise RouteRefused(
            403, f"this token is not for {about}", "use a token that the hub's --token-file lists for it"
        )


def _check_life(request: Request, member: str) -> None:
    """Refuse a request if the caller does not know the secret of the member for which it speaks."""
    if not hmac.compare_digest(member_of(request.headers.get(LIFE_HEADER, "")).encode(), member.encode()):
        audit.warning("event=impostor path=%r member=%s client=%s", request.url.path, member, _client(request))
        raise RouteRefused(
            403, f"this caller is not member {member}", f"send the member's secret in the header {LIFE_HEADER}"
        )


def _parameter(operation: HubOperation, request: Request) -> str:
    """Return the member in the path or the model in the query, or an empty string if the operation has neither."""
    try:
        if "{member}" in operation.path:
            return msgspec.convert(request.path_params["member"], messages.MemberId)
        if operation.name == "status" and "model" in request.query_params:
            return msgspec.convert(request.query_params["model"], messages.Word)
    except msgspec.ValidationError as error:
        raise RouteRefused(422, f"{operation.name}: {error}") from error
    return ""


async def _body(request: Request) -> bytes:
    """Read a body with limits on size and time, unlike Starlette's `request.body()`."""
    body = bytearray()
    has_more = True
    try:
        async with asyncio.timeout(BODY_S):
            while has_more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RouteRefused(400, "the caller closed the connection")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise RouteRefused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                has_more = message.get("more_body", False)
    except TimeoutError as error:
        raise RouteRefused(408, f"the body took more than {BODY_S} s") from error
    return bytes(body)


_REF = "#/components/schemas/{name}"


def _document(auth: Auth) -> bytes:
    """Return the OpenAPI 3.1 document. msgspec creates its schemas from the messages."""
    named = [
        kind for operation in OPERATIONS for kind in (operation.request_type, operation.reply_type) if kind is not None
    ]
    _, components = msgspec.json.schema_components([*named, messages.Fault], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    for path, about in (
        ("/healthz", "The process answers."),
        ("/readyz", "The store also answers."),
        ("/metrics", "For Prometheus."),
    ):
        page = {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
        get: dict[str, Any] = {"summary": about, "operationId": path[1:], "responses": {"200": page}}
        if path != "/healthz":
            get["responses"]["503"] = _fault(FAULTS[503])
        if path == "/metrics":
            get["responses"]["401"] = _fault(FAULTS[401])
        else:
            get["security"] = []
        paths[path] = {"get": get}
    about = "The directory of a fleet: which member holds which weights."
    openapi: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock hub", "version": "1", "description": about},
        "paths": paths,
        "components": {"schemas": dict(components)},
    }
    if auth.token_file is not None:
        openapi["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"token": []}]
    # JSON Schema's patterns end with $, which does not match before a newline as Python's $ does.
    return msgspec.json.encode(openapi).replace(rb"\\Z", b"$")


def _described(operation: HubOperation) -> dict[str, Any]:
    responses = {"204": {"description": "done"}}
    if operation.reply_type is not None:
        responses = {"200": {"description": "answered", **_json(operation.reply_type.__name__)}}
    responses |= {str(status): _fault(about) for status, about in FAULTS.items()}
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.about, "responses": responses}
    if operation.request_type is not None:
        described["requestBody"] = {"required": True, **_json(operation.request_type.__name__)}
    parameters: list[dict[str, Any]] = []
    if "{member}" in operation.path:
        schema = msgspec.json.schema(messages.MemberId)
        parameters.append({"name": "member", "in": "path", "required": True, "schema": schema})
    if operation.name == "status":
        schema = msgspec.json.schema(messages.Word)
        parameters.append({"name": "model", "in": "query", "required": False, "schema": schema})
    if operation.speaker is not None:
        about = "The member's secret, whose digest is its id."
        header = {"name": LIFE_HEADER, "in": "header", "required": True, "schema": {"type": "string"}}
        parameters.append({**header, "description": about})
    return described | ({"parameters": parameters} if parameters else {})


def _json(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}}


def _fault(about: str) -> dict[str, Any]:
    return {"description": about, **_json("Fault")}
