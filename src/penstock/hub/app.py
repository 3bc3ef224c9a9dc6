"""The hub over HTTP: a `Directory` as an app of FastAPI, with its OpenAPI page, metrics and health.

In: a directory, who may ask. Out: the app.
Not here: sockets and threads (`server`), what is answered (`directory`), the caller's side (`client`).

Bodies are JSON of `messages`, decoded by msgspec: bounded, typed, unknown fields ignored. Whatever is not 2xx has a
`Fault` as its body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import (
    HubUnavailable,
    MissingExtra,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    UnknownMember,
)
from penstock.hub.audit import CALLER, STRANGER
from penstock.hub.auth import LIFE_HEADER, Auth, Caller, member_of
from penstock.hub.directory import Directory
from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Complaint,
    Fault,
    Hello,
    MemberId,
    Status,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
    Why,
    WhyRequest,
    Word,
)
from penstock.hub.store import MemoryStore
from penstock.hub.sync_messages import SyncReply, SyncRequest
from penstock.hub.tls import CERTIFICATE
from penstock.hub.version_negotiation import UPGRADE_HINT, AnnouncedVersion, version_fault

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.routing import Match, Route
except ImportError as error:
    raise MissingExtra("the hub needs FastAPI", hint="pip install 'penstock[hub]'") from error

if TYPE_CHECKING:
    from penstock.hub.metrics import Metrics

MAX_BODY_BYTES = 8 << 20
"""A beat of 1,024 holdings with some hundred ranges each; decoding it takes some tens of milliseconds."""
BODY_S = 20.0
"""A body that takes longer to arrive is refused."""
_ANNOUNCED = msgspec.json.Decoder(AnnouncedVersion)
_log = logging.getLogger("penstock.hub")
audit = logging.getLogger("penstock.audit")


class _Refused(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.status, self.fault = status, Fault(error=error, hint=hint)


_STATUS: tuple[tuple[type[PenstockError], int], ...] = (
    (UnknownMember, 410),
    (PermissionDenied, 403),
    (PlanError, 409),
    (SourceBusy, 429),
    (HubUnavailable, 503),
)
_WHAT = {
    400: "the caller speaks another major version of the protocol",
    401: "no token, or not one of this hub's",
    403: "not for this caller, or another process's member",
    409: "the holding contradicts itself",
    410: "the member is not known: say hello again",
    413: "the body is too large",
    422: "the body or a parameter is not what the schema says",
    429: "this caller asks for that too often",
    503: "the hub's store does not answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One question: how it is put, what answers it."""

    name: str
    method: str
    path: str
    about: str
    takes: type | None = None
    gives: type | None = None
    models: Callable[[Any], Iterable[str]] = lambda _: ()
    """Models the body is about."""
    answer: Callable[[Directory, str, Any, Caller], Any]
    """Of the directory, the parameter in path or query, the body, who asks."""
    speaker: Callable[[str, Any], str] | None = None
    """Of the parameter and the body: the member spoken for, whose secret the caller must show."""


def _in_path(parameter: str, _: Any) -> str:
    return parameter


def _in_body(_: str, body: Any) -> str:
    return str(body.member)


def _flown(request: UpstreamsRequest | ClaimRequest) -> Iterable[str]:
    return (request.holding.identity.model,)


OPERATIONS = (
    _Operation(
        name="hello", method="POST", path="/v1/hello", about="A process life joins.", takes=Hello, gives=Welcome,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.hello(body, caller),
    ),
    _Operation(
        name="beat", method="PUT", path="/v1/members/{member}", about="A member lives, and holds this.", takes=Beat,
        speaker=_in_path,
        models=lambda beat: (
            *(holding.identity.model for holding in beat.holdings), *(state.name for state in beat.syncs),
        ),
        answer=lambda directory, member, body, caller: directory.beat(member, body),
    ),
    _Operation(
        name="leave", method="DELETE", path="/v1/members/{member}", about="A member is gone for good.",
        speaker=_in_path,
        answer=lambda directory, member, _, caller: directory.leave(member),
    ),
    _Operation(
        name="flight", method="POST", path="/v1/flight", about="Whom to take chunks from, with grants.",
        takes=UpstreamsRequest, gives=UpstreamsReply, models=_flown, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.upstreams(body),
    ),
    _Operation(
        name="claim", method="POST", path="/v1/claim", about="Chunks to read from storage.",
        takes=ClaimRequest, gives=ClaimReply, models=_flown, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.claim(body),
    ),
    _Operation(
        name="sync", method="POST", path="/v1/sync", about="Who takes part in a sync, with grants.",
        takes=SyncRequest, gives=SyncReply, models=lambda request: (request.name,),
        speaker=_in_body, answer=lambda directory, _, body, caller: directory.sync(body),
    ),
    _Operation(
        name="complain", method="POST", path="/v1/complain", about="A source could not be used.", takes=Complaint,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.complain(body, caller),
    ),
    _Operation(
        name="status", method="GET", path="/v1/status", about="Members and what they hold.", gives=Status,
        answer=lambda directory, model, _, caller: directory.status(model or None),
    ),
    _Operation(
        name="why", method="POST", path="/v1/why", about="Why who takes a model from whom.", takes=WhyRequest,
        gives=Why, models=lambda request: (request.model,),
        answer=lambda directory, _, body, caller: directory.why(body),
    ),
)  # fmt: skip


def create_app(directory: Directory, auth: Auth | None = None) -> FastAPI:
    """The app.

    Args:
        directory: answers.
        auth: who may ask; the default lets everyone, so the socket must keep strangers out.

    Raises:
        MissingExtra: FastAPI or prometheus-client is not installed.
    """
    from penstock.hub.metrics import Metrics
    from penstock.hub.openapi import add_pages, document

    auth = auth or Auth()
    metrics = Metrics(directory)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beating = asyncio.create_task(_beat(directory, auth))
        yield
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    app = FastAPI(title="Penstock hub", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    for operation in OPERATIONS:
        # Starlette's route: FastAPI's would look for parameters to decode, which msgspec does.
        app.add_route(operation.path, _endpoint(operation, directory, auth, metrics), methods=[operation.method])
    add_pages(app, directory, auth, metrics)
    app.openapi = lambda: document(OPERATIONS, _WHAT, auth)  # type: ignore[method-assign]
    _map_faults(app, metrics)
    return app


async def _beat(directory: Directory, auth: Auth) -> None:
    """Keep the hub's life marked, and remove members of revoked tokens; a store that is away is tried at the next beat.

    A revoked token is refused from the next question on. Its members are removed here, so that nobody is sent to them
    until they have been silent for long enough.
    """
    checked = auth.tokens
    while True:
        try:
            await run_in_threadpool(directory.begin)
            if auth.tokens is not checked:
                good = auth.tokens
                await run_in_threadpool(directory.expel, {caller.name for _, caller in good})
                checked = good
        except HubUnavailable as error:
            _log.warning("the store does not answer: %s", error.message)
        await asyncio.sleep(directory.beat_s)


def _endpoint(
    operation: _Operation, directory: Directory, auth: Auth, metrics: Metrics
) -> Callable[[Request], Awaitable[Response]]:
    decoder: msgspec.json.Decoder[Any] | None = None
    if operation.takes is not None:
        decoder = msgspec.json.Decoder(operation.takes)
    encoder = msgspec.json.Encoder()
    blocking = not isinstance(directory.store, MemoryStore)

    async def answer(request: Request) -> Response:
        with metrics.timed(operation.name):
            caller = check_caller(request, auth)
            parameter = _parameter(operation, request)
            body = await _body(request)
            if decoder is None:
                said = None
            else:
                try:
                    if operation.takes is Hello:
                        _check_version(_ANNOUNCED.decode(body))
                    said = decoder.decode(body)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise _Refused(422, f"{operation.name}: {error}"[:1000]) from error
            _check_models(operation, caller, parameter, said)
            speaker = None if operation.speaker is None else operation.speaker(parameter, said)
            if speaker is not None:
                _check_life(request, speaker)

            def answer() -> Any:
                if speaker is not None and caller.certificate:
                    directory.check_certificate(speaker, caller.certificate)
                return operation.answer(directory, parameter, said, caller)

            found = await run_in_threadpool(answer) if blocking else answer()
            if operation.gives is None:
                return Response(status_code=204)
            return Response(encoder.encode(found), media_type="application/json")

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except asyncio.CancelledError:
            # The hub ends, and this caller took too long: uvicorn would log a traceback for it.
            return Response(status_code=503)

    return endpoint


def _check_version(announced: AnnouncedVersion) -> None:
    """Refuse a member of another major version by name, before the rest of what it says is looked at."""
    fault = version_fault(announced.protocol, "this member", "the hub")
    if fault:
        raise _Refused(400, fault, UPGRADE_HINT)


def check_caller(request: Request, auth: Auth) -> Caller:
    """Who asks; an answer of 401 if nobody we know."""
    certificate = request.scope.get(CERTIFICATE, "") if auth.client_ca is not None else ""
    caller = auth.caller(request.headers.get("authorization", ""), certificate)
    CALLER.set(STRANGER if caller is None else caller.name)
    if caller is None:
        audit.warning("event=unauthorized path=%r client=%s", request.url.path, _client(request))
        raise _Refused(401, "no token, or not one of this hub's", "give the token of the hub's --token-file")
    return caller


def _client(request: Request) -> str:
    return request.client.host if request.client else "unix"


def _check_models(operation: _Operation, caller: Caller, parameter: str, said: Any) -> None:
    models = tuple(operation.models(said))
    if operation.name == "status":
        models = (parameter,)
    if not caller.may_ask(models):
        audit.warning("event=forbidden operation=%s models=%r", operation.name, ",".join(models))
        about = ", ".join(filter(None, sorted(set(models)))) or "all models"
        raise _Refused(403, f"this token is not for {about}", "give one that the hub's --token-file lists for it")


def _check_life(request: Request, member: str) -> None:
    """An answer of 403 unless the caller is the member that it speaks for."""
    if not hmac.compare_digest(member_of(request.headers.get(LIFE_HEADER, "")).encode(), member.encode()):
        audit.warning("event=impostor path=%r member=%s client=%s", request.url.path, member, _client(request))
        raise _Refused(403, f"this caller is not member {member}", f"show the member's secret as {LIFE_HEADER}")


def _parameter(operation: _Operation, request: Request) -> str:
    """The member of the path, or the model of the query; empty: none."""
    try:
        if "{member}" in operation.path:
            return msgspec.convert(request.path_params["member"], MemberId)
        if operation.name == "status" and "model" in request.query_params:
            return msgspec.convert(request.query_params["model"], Word)
    except msgspec.ValidationError as error:
        raise _Refused(422, f"{operation.name}: {error}") from error
    return ""


async def _body(request: Request) -> bytes:
    """The whole body, bounded in bytes and time."""
    parts: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                total += len(part)
                if total > MAX_BODY_BYTES:
                    raise _Refused(413, f"more than {MAX_BODY_BYTES} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise _Refused(408, f"the body took more than {BODY_S} s") from error
    except ClientDisconnect as error:
        raise _Refused(400, "the caller is gone") from error
    return b"".join(parts)


def _map_faults(app: FastAPI, metrics: Metrics) -> None:
    """Every failure becomes a `Fault` with its status."""

    def answer(status: int, fault: Fault, headers: dict[str, str] | None = None) -> Response:
        metrics.refused(status)
        return Response(msgspec.json.encode(fault), status, headers, "application/json")

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, _Refused)
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return answer(error.status, error.fault, headers)

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, PenstockError)
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        headers = {"Retry-After": "1"} if status == 503 else None
        return answer(status, Fault(error=error.message, hint=error.hint or ""), headers)

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            routes = [route for route in app.routes if isinstance(route, Route)]
            there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({method for route in there for method in route.methods or ()}))
        return answer(error.status_code, Fault(error=str(error.detail)), headers)

    async def invalid(_: Request, error: Exception) -> Response:
        return answer(422, Fault(error=str(error)[:1000]))

    app.add_exception_handler(_Refused, refused)
    app.add_exception_handler(PenstockError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, invalid)
