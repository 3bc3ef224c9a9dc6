"""The hub over HTTP: its operations, a `Directory` as an ASGI app, and the OpenAPI document.

`OPERATIONS` is the single list of the hub's requests. The app creates its routes from it, and the document its paths.
Bodies are JSON encodings of `messages`. msgspec decodes them with bounds and types, and ignores unknown fields. The
body of an answer with an error status is a `Fault`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.entry_points import install_hint
from penstock.errors import MALFORMED, HubUnavailable, MissingExtra
from penstock.hub.audit import CALLER, stranger
from penstock.hub.auth import CERTIFICATE, LIFE_HEADER, OPERATOR, Auth, Caller, member_of
from penstock.hub.connection import UNAUTHORIZED
from penstock.hub.directory import Directory
from penstock.hub.job_state import JobState
from penstock.hub.messages import (
    PROTOCOL_HEADER,
    UNANNOUNCED,
    UPGRADE_HINT,
    AnnouncedVersion,
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    DecideReply,
    DecideRequest,
    Drain,
    Fault,
    FaultReport,
    Hello,
    MemberId,
    Status,
    SyncReply,
    SyncRequest,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
    Why,
    WhyRequest,
    Word,
    version_fault,
)
from penstock.hub.routes import Handler, HubApp, Lifespan, RouteRefused
from penstock.hub.store import MemoryStore
from penstock.logs import log_named
from penstock.types import MIB

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as error:
    raise MissingExtra(f"the hub needs Starlette, whose import failed: {error}", hint=install_hint("hub")) from error

if TYPE_CHECKING:
    from penstock.hub.metrics import Metrics


MAX_BODY_BYTES = 8 * MIB
"""Enough for a heartbeat with 1,024 holdings of some hundred ranges each. Decoding it takes some tens of
milliseconds."""
BODY_S = 20.0
"""Seconds for a body to arrive. A slower one is refused."""
_ANNOUNCED = msgspec.json.Decoder(AnnouncedVersion)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOperation:
    """An operation of the hub, with its method, path, message types and the function that answers it."""

    name: str
    method: str
    path: str
    about: str
    takes: type | None = None
    gives: type | None = None
    models: Callable[[Any], Iterable[str]] = lambda _: ()
    """Returns the models that the body names. The caller's token must allow them."""
    answer: Callable[[Directory, str, Any, Caller], Any]
    """Called with the directory, the parameter from the path or query, the body and the caller."""
    speaker: Callable[[str, Any], str] | None = None
    """Returns the member for which the caller speaks. The caller must send the secret of this member."""
    is_for_operators: bool = False


def _in_path(parameter: str, _: Any) -> str:
    """Return the member that the path names."""
    return parameter


def _in_body(_: str, body: Any) -> str:
    """Return the member that the body names."""
    return str(body.member)


def _model_of(request: UpstreamsRequest | ClaimRequest) -> Iterable[str]:
    """Return the model of a request's holding."""
    return (request.holding.identity.model,)


OPERATIONS = (
    HubOperation(
        name="hello", method="POST", path="/v1/hello", about="A process joins the fleet.", takes=Hello, gives=Welcome,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.hello(body, caller),
    ),
    HubOperation(
        name="beat", method="PUT", path="/v1/members/{member}", about="A heartbeat with the state of the member.",
        takes=Beat, gives=BeatReply, speaker=_in_path,
        models=lambda beat: (
            *(holding.identity.model for holding in beat.holdings), *(state.name for state in beat.syncs),
        ),
        answer=lambda directory, member, body, caller: directory.beat(member, body, caller),
    ),
    HubOperation(
        name="leave", method="DELETE", path="/v1/members/{member}", about="A member leaves the fleet.",
        speaker=_in_path,
        answer=lambda directory, member, _, caller: directory.leave(member, caller),
    ),
    HubOperation(
        name="flight", method="POST", path="/v1/flight", about="Members to read chunks from, with grants.",
        takes=UpstreamsRequest, gives=UpstreamsReply, models=_model_of, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.upstreams(body, caller),
    ),
    HubOperation(
        name="claim", method="POST", path="/v1/claim", about="Chunks to read from storage.",
        takes=ClaimRequest, gives=ClaimReply, models=_model_of, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.claim(body, caller),
    ),
    HubOperation(
        name="sync", method="POST", path="/v1/sync", about="Members of a sync, with grants.",
        takes=SyncRequest, gives=SyncReply, models=lambda request: (request.name,),
        speaker=_in_body, answer=lambda directory, _, body, caller: directory.sync(body),
    ),
    HubOperation(
        name="decide", method="POST", path="/v1/decide", about="The decision on a version with a two-phase commit.",
        takes=DecideRequest, gives=DecideReply, models=lambda request: (request.name,),
        speaker=_in_body, answer=lambda directory, _, body, caller: directory.decide(body, caller),
    ),
    HubOperation(
        name="complain", method="POST", path="/v1/complain", about="Report an unusable source.", takes=FaultReport,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: _complain(directory, body, caller),
    ),
    HubOperation(
        name="job", method="PUT", path="/v1/jobs/{member}", about="The state of a conversion.", takes=JobState,
        models=lambda state: (state.name,), speaker=_in_path,
        answer=lambda directory, job, body, caller: directory.job(job, body, caller),
    ),
    HubOperation(
        name="drain", method="PUT", path="/v1/drains/{member}", about="Send no more readers to a member.", takes=Drain,
        is_for_operators=True,
        answer=lambda directory, member, body, caller: directory.drain(member, body, caller),
    ),
    HubOperation(
        name="undrain", method="DELETE", path="/v1/drains/{member}", about="Send readers to a member again.",
        is_for_operators=True,
        answer=lambda directory, member, _, caller: directory.drain(member, None, caller),
    ),
    HubOperation(
        name="status", method="GET", path="/v1/status", about="Members and what they hold.", gives=Status,
        answer=lambda directory, model, _, caller: msgspec.structs.replace(
            directory.status(model or None), may_drain=caller.is_operator
        ),
    ),
    HubOperation(
        name="why", method="POST", path="/v1/why", about="Reasons why members read a model from their upstreams.",
        takes=WhyRequest, gives=Why, models=lambda request: (request.model,),
        answer=lambda directory, _, body, caller: directory.why(body),
    ),
)  # fmt: skip


def _complain(directory: Directory, complaint: FaultReport, caller: Caller) -> None:
    """Record a complaint if its caller may access the holder's model or reads the same weights."""
    if not directory.sees_any(complaint.key, (complaint.of, complaint.member), caller):
        # The answer is the same for a holder of a hidden model and for a member without holdings. So it reveals no
        # holder.
        audit.warning("event=forbidden operation=complain of=%s key=%s", complaint.of, complaint.key)
        hint = "only readers of a model may complain about its holders"
        raise RouteRefused(403, f"this token is not for models with the key {complaint.key}", hint)
    directory.complain(complaint, caller)


def create_app(directory: Directory, auth: Auth | None = None) -> HubApp:
    """Create the hub's app.

    Args:
        directory: answers the requests.
        auth: authentication. The default admits every caller, so the socket itself must be private.

    Raises:
        MissingExtra: Starlette or prometheus-client is not installed.
    """
    from penstock.hub.metrics import Metrics
    from penstock.hub.page import FleetFeed, add_page, keep_sampling

    auth = auth or Auth()
    metrics = Metrics(directory)
    feed = FleetFeed(directory.status, on_gone=directory.note_gone)

    def on_unauthorized(path: str, client: str) -> None:
        metrics.refused(401)
        CALLER.set(stranger(client))
        audit.warning("event=unauthorized path=%r client=%s", path, client)

    app = HubApp(
        _running(lambda: _beat(directory, auth), lambda: keep_sampling(feed)),
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
    """The requests that the page of `penstock ui` sends to a hub. `client.HubClient` implements it."""

    def status(self) -> Status:
        """Return the state of the fleet."""
        ...

    def drain(self, member: str, drain: Drain | None) -> None:
        """Drain a member, so that it gets no more readers. None ends the drain."""
        ...


def create_page_app(hub: MemberClient, auth: Auth) -> HubApp:
    """Create an app that serves the fleet page and forwards its user's requests to the hub.

    Raises:
        MissingExtra: Starlette is not installed.
    """
    from penstock.hub.page import FleetFeed, add_page, keep_sampling

    feed = FleetFeed(hub.status)
    app = HubApp(_running(lambda: keep_sampling(feed)))
    add_page(app, feed, lambda request: _check_caller(request, auth))
    app.add_route("/v1/drains/{member}", _drain_at(hub, auth), "PUT", "DELETE")
    return app


def _drain_at(hub: MemberClient, auth: Auth) -> Handler:
    """Return a handler that forwards a drain request. The hub decides by the client's token whether to accept it."""
    decoder = msgspec.json.Decoder(Drain)

    async def endpoint(request: Request) -> Response:
        _check_caller(request, auth)
        _check_site("drain", request)
        try:
            member = msgspec.convert(request.path_params["member"], MemberId)
            order = decoder.decode(await _body(request)) if request.method == "PUT" else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RouteRefused(422, f"drain: {error}"[:1000]) from error
        await run_in_threadpool(hub.drain, member, order)
        return Response(status_code=204)

    return endpoint


def _running(*work: Callable[[], Coroutine[Any, Any, None]]) -> Lifespan:
    """Return a lifespan that runs these functions in the server's event loop and cancels them when the app ends."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(start()) for start in work]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return lifespan


async def _beat(directory: Directory, auth: Auth) -> None:
    """Renew the hub's life mark once a beat, and remove the members of revoked tokens.

    Retry in the next beat if the store fails.
    """
    checked = auth.tokens
    while True:
        try:
            await run_in_threadpool(directory.begin)
            # The next request with a revoked token is refused. Remove its members here, because otherwise they would
            # get readers until their entries expire. Compare by identity, because a changed file is read into a new
            # tuple.
            if auth.tokens is not checked:
                good = auth.tokens
                await run_in_threadpool(directory.expel, {caller.name for _, caller in good})
                checked = good
        except HubUnavailable as error:
            _log.warning("the store does not answer: %s", error.message)
        await asyncio.sleep(directory.beat_s)


def _add_pages(app: HubApp, directory: Directory, auth: Auth, metrics: Metrics) -> None:
    """Add `/healthz` (the process answers), `/readyz` (its store also answers), `/metrics` and `/openapi.json`."""

    # The health checks are public, because a monitor has no token. They reveal nothing about the fleet.
    async def healthz(_: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        # Read any entry. A store that does not answer raises HubUnavailable, which becomes status 503.
        await run_in_threadpool(directory.store.read, "hub/life")
        return Response("ok\n", media_type="text/plain")

    async def page(request: Request) -> Response:
        # Metrics are not public, because their labels name models and a token may be limited to some models.
        caller = _check_caller(request, auth)
        return Response(await run_in_threadpool(metrics.page, caller), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return JSONResponse(_document(auth))

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", page)):
        app.add_route(path, endpoint, "GET")
    app.add_route("/openapi.json", openapi, "GET", "HEAD")


def _endpoint(operation: HubOperation, directory: Directory, auth: Auth, metrics: Metrics) -> Handler:
    """Return the handler for an operation."""
    # Create the decoder once, because msgspec compiles it from the message's type.
    decoder: msgspec.json.Decoder[Any] | None = None
    if operation.takes is not None:
        decoder = msgspec.json.Decoder(operation.takes)
    encoder = msgspec.json.Encoder()
    # A store in memory answers in microseconds. Handing such a request to a thread would take longer than the answer.
    blocking = not isinstance(directory.store, MemoryStore)

    async def answer(request: Request) -> Response:
        with metrics.timed(operation.name):
            caller = _check_caller(request, auth)
            # Check the version first, because all other fields may have a different meaning in another major version.
            if PROTOCOL_HEADER in request.headers:
                _check_version(request, request.headers[PROTOCOL_HEADER], "this caller")
            if operation.is_for_operators:
                _check_operator(operation.name, request, caller)
            parameter = _parameter(operation, request)
            body = await _body(request)
            if decoder is None:
                message = None
            else:
                try:
                    # Decode only the version first. Other fields from a member of another version may not decode, and
                    # its error must name the versions and not a field.
                    if operation.takes is Hello:
                        announced = _ANNOUNCED.decode(body)
                        _check_version(request, announced.protocol or UNANNOUNCED, f"member {announced.sender}")
                    message = decoder.decode(body)
                except MALFORMED as error:
                    raise RouteRefused(422, f"{operation.name}: {error}"[:1000]) from error
            _check_models(operation, caller, parameter, message)
            speaker = None if operation.speaker is None else operation.speaker(parameter, message)
            if speaker is not None:
                _check_life(request, speaker)

            # Run both in one function on a thread, because both may wait for the store and must not block the event
            # loop.
            def answer() -> Any:
                if speaker is not None and caller.certificate:
                    directory.check_certificate(speaker, caller.certificate)
                return operation.answer(directory, parameter, message, caller)

            reply = await run_in_threadpool(answer) if blocking else answer()
            if operation.gives is None:
                return Response(status_code=204)
            return Response(encoder.encode(reply), media_type="application/json")

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except asyncio.CancelledError:
            # The hub is shutting down and this request took too long. Without an answer uvicorn would log a traceback.
            return Response(status_code=503)

    return endpoint


def _check_version(request: Request, protocol: str, them: str) -> None:
    """Refuse a caller of another major version before the rest of its message is decoded.

    The error names both versions.
    """
    fault = version_fault(protocol, them, "the hub")
    if fault:
        audit.warning("event=version path=%r protocol=%r client=%s", request.url.path, protocol, _client(request))
        raise RouteRefused(400, fault, UPGRADE_HINT)


def _check_caller(request: Request, auth: Auth) -> Caller:
    """Authenticate the caller of a request, or refuse the request with status 401."""
    certificate = request.scope.get(CERTIFICATE, "") if auth.client_ca is not None else ""
    caller = auth.caller(request.headers.get("authorization", ""), certificate)
    CALLER.set(stranger(_client(request)) if caller is None else caller.name)
    if caller is None:
        # The token was revoked after the connection was accepted. Requests without a token are refused earlier.
        audit.warning("event=unauthorized path=%r client=%s", request.url.path, _client(request))
        raise RouteRefused(401, UNAUTHORIZED.error, UNAUTHORIZED.hint)
    return caller


def _check_operator(operation: str, request: Request, caller: Caller) -> None:
    """Refuse a request with status 403 if its caller is no operator, or if a page of another site sent it."""
    _check_site(operation, request)
    if not caller.is_operator:
        audit.warning("event=forbidden operation=%s caller=%s", operation, caller.name)
        raise RouteRefused(
            403, "only an operator's token may drain members", f"write {OPERATOR} after the token in --token-file"
        )


def _check_site(operation: str, request: Request) -> None:
    """Refuse a request with status 403 if a browser says that a page of another site sent it."""
    # A foreign page cannot misuse a browser's credentials, because no cookie authenticates here. The header is checked
    # nevertheless.
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        audit.warning("event=forbidden operation=%s site=%r", operation, request.headers["sec-fetch-site"])
        raise RouteRefused(
            403, "a page of another site sent this request", "use the hub's own page, or `penstock drain`"
        )


def _client(request: Request) -> str:
    """Return the caller's host, for the audit."""
    return request.client.host if request.client else "unix"


def _check_models(operation: HubOperation, caller: Caller, parameter: str, body: Any) -> None:
    """Refuse a request with status 403 if the caller's token does not allow a model that it names."""
    models = tuple(operation.models(body))
    # A status request without a model asks for all models, which requires a token for all of them.
    if operation.name == "status":
        models = (parameter,)
    if not caller.may_ask(models):
        audit.warning("event=forbidden operation=%s models=%r", operation.name, ",".join(models))
        about = ", ".join(filter(None, sorted(set(models)))) or "all models"
        raise RouteRefused(
            403, f"this token is not for {about}", "use a token that the hub's --token-file lists for it"
        )


def _check_life(request: Request, member: str) -> None:
    """Refuse a request with status 403 if the caller does not know the secret of the member for which it speaks."""
    if not hmac.compare_digest(member_of(request.headers.get(LIFE_HEADER, "")).encode(), member.encode()):
        audit.warning("event=impostor path=%r member=%s client=%s", request.url.path, member, _client(request))
        raise RouteRefused(
            403, f"this caller is not member {member}", f"send the member's secret in the header {LIFE_HEADER}"
        )


def _parameter(operation: HubOperation, request: Request) -> str:
    """Return the member in the path or the model in the query. Empty if the operation has neither."""
    try:
        if "{member}" in operation.path:
            return msgspec.convert(request.path_params["member"], MemberId)
        if operation.name == "status" and "model" in request.query_params:
            return msgspec.convert(request.query_params["model"], Word)
    except msgspec.ValidationError as error:
        raise RouteRefused(422, f"{operation.name}: {error}") from error
    return ""


async def _body(request: Request) -> bytes:
    """Read the whole body, with limits on bytes and time."""
    # Starlette's `request.body()` has neither limit. One caller could fill the memory or keep a request open forever.
    parts: list[bytes] = []
    total = 0
    is_whole = False
    try:
        async with asyncio.timeout(BODY_S):
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RouteRefused(400, "the caller closed the connection")
                part = message.get("body", b"")
                total += len(part)
                if total > MAX_BODY_BYTES:
                    raise RouteRefused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                parts.append(part)
                is_whole = not message.get("more_body", False)
    except TimeoutError as error:
        raise RouteRefused(408, f"the body took more than {BODY_S} s") from error
    return b"".join(parts)


_REF = "#/components/schemas/{name}"


def _document(auth: Auth) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. msgspec creates its schemas from the messages."""
    named = [kind for operation in OPERATIONS for kind in (operation.takes, operation.gives) if kind is not None]
    _, components = msgspec.json.schema_components([*named, Fault], ref_template=_REF)
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
    openapi: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock hub",
            "version": "1",
            "description": "The directory of a fleet: which member holds which weights.",
        },
        "paths": paths,
        "components": {"schemas": dict(components)},
    }
    if auth.token_file is not None:
        openapi["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"token": []}]
    described: dict[str, Any] = _as_ecma(openapi)
    return described


def _as_ecma(value: Any) -> Any:
    r"""Replace Python's `\Z` at the end of patterns with JSON Schema's `$`. Both allow no newline after the match."""
    if isinstance(value, dict):
        return {
            name: item.replace(r"\Z", "$") if name == "pattern" and isinstance(item, str) else _as_ecma(item)
            for name, item in value.items()
        }
    return [_as_ecma(item) for item in value] if isinstance(value, list) else value


def _described(operation: HubOperation) -> dict[str, Any]:
    """Return the document's entry for an operation."""
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.about, "responses": {}}
    if operation.gives is None:
        described["responses"]["204"] = {"description": "done"}
    else:
        described["responses"]["200"] = {"description": "answered", **_json(operation.gives.__name__)}
    for status, about in FAULTS.items():
        described["responses"][str(status)] = _fault(about)
    if operation.takes is not None:
        described["requestBody"] = {"required": True, **_json(operation.takes.__name__)}
    parameters: list[dict[str, Any]] = []
    if "{member}" in operation.path:
        schema = msgspec.json.schema(MemberId)
        parameters.append({"name": "member", "in": "path", "required": True, "schema": schema})
    if operation.name == "status":
        schema = msgspec.json.schema(Word)
        parameters.append({"name": "model", "in": "query", "required": False, "schema": schema})
    if operation.speaker is not None:
        about = "The member's secret, whose digest is its id."
        parameters.append(
            {"name": LIFE_HEADER, "in": "header", "required": True, "schema": {"type": "string"}, "description": about}
        )
    return described | ({"parameters": parameters} if parameters else {})


def _json(name: str) -> dict[str, Any]:
    """Return a JSON body with a named schema."""
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}}


def _fault(about: str) -> dict[str, Any]:
    """Return the document's entry for an error response."""
    return {"description": about, **_json("Fault")}
