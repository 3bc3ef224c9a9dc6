"""The hub over HTTP: a `Directory` as an app of FastAPI, with its OpenAPI page, metrics and health.

In: a directory, the authentication. Out: the app.
Not here: sockets and threads (`server`), the answers (`directory`), the caller's side (`client`).

Bodies are JSON of `messages`, decoded by msgspec: bounded, typed, unknown fields ignored. Whatever is not 2xx has a
`Fault` as its body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
from penstock.hub.connection import UNAUTHORIZED
from penstock.hub.directory import Directory
from penstock.hub.messages import (
    Fault,
    Hello,
    MemberId,
    Word,
)
from penstock.hub.operations import FAULTS, OPERATIONS, Operation
from penstock.hub.store import MemoryStore
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


def create_app(directory: Directory, auth: Auth | None = None) -> FastAPI:
    """Create the hub's app.

    Args:
        directory: answers the requests.
        auth: authentication; the default admits every caller, so the socket itself must be private.

    Raises:
        MissingExtra: FastAPI or prometheus-client is not installed.
    """
    from penstock.hub.metrics import Metrics
    from penstock.hub.openapi import document

    auth = auth or Auth()
    metrics = Metrics(directory)

    def on_unauthorized(path: str, client: str) -> None:
        metrics.refused(401)
        CALLER.set(STRANGER)
        audit.warning("event=unauthorized path=%r client=%s", path, client)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beating = asyncio.create_task(_beat(directory, auth))
        yield
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    app = FastAPI(title="Penstock hub", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    for operation in OPERATIONS:
        # Starlette's route: FastAPI's own would decode parameters a second time, which msgspec does already.
        app.add_route(operation.path, _endpoint(operation, directory, auth, metrics), methods=[operation.method])
    _add_pages(app, directory, auth, metrics)
    app.state.on_unauthorized = on_unauthorized
    app.openapi = lambda: document(OPERATIONS, FAULTS, auth)  # type: ignore[method-assign]
    _map_faults(app, metrics)
    return app


async def _beat(directory: Directory, auth: Auth) -> None:
    """Renew the hub's life mark, and remove members of revoked tokens; a missing store is tried at the next beat.

    A revoked token is refused from the next request on. Its members are removed here: otherwise readers would be sent
    to them until their entries expire.
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


def _add_pages(app: FastAPI, directory: Directory, auth: Auth, metrics: Metrics) -> None:
    """Add `/healthz` (the process answers), `/readyz` (its store answers too) and `/metrics`."""

    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz() -> Response:
        await run_in_threadpool(directory.store.read, "hub/life")
        return Response("ok\n", media_type="text/plain")

    async def page(request: Request) -> Response:
        # Labels name models, and a token may be limited to some of them: the page is not public as health checks are.
        _check_caller(request, auth)
        return Response(await run_in_threadpool(metrics.page), media_type="text/plain; version=0.0.4")

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", page)):
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)


def _endpoint(
    operation: Operation, directory: Directory, auth: Auth, metrics: Metrics
) -> Callable[[Request], Awaitable[Response]]:
    decoder: msgspec.json.Decoder[Any] | None = None
    if operation.takes is not None:
        decoder = msgspec.json.Decoder(operation.takes)
    encoder = msgspec.json.Encoder()
    # A store in memory answers in microseconds: handing such a request to a thread would cost more than the answer.
    blocking = not isinstance(directory.store, MemoryStore)

    async def answer(request: Request) -> Response:
        with metrics.timed(operation.name):
            caller = _check_caller(request, auth)
            parameter = _parameter(operation, request)
            body = await _body(request)
            if decoder is None:
                message = None
            else:
                try:
                    # The version alone first: a member of another version may send fields that do not decode here, and
                    # must read that the versions differ, not that a field is wrong.
                    if operation.takes is Hello:
                        _check_version(_ANNOUNCED.decode(body))
                    message = decoder.decode(body)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise _Refused(422, f"{operation.name}: {error}"[:1000]) from error
            _check_models(operation, caller, parameter, message)
            speaker = None if operation.speaker is None else operation.speaker(parameter, message)
            if speaker is not None:
                _check_life(request, speaker)

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
            # The hub is shutting down and this request took too long: without an answer uvicorn logs a traceback.
            return Response(status_code=503)

    return endpoint


def _check_version(announced: AnnouncedVersion) -> None:
    """Refuse a member of another major version, and name both versions, before the rest of its message is decoded."""
    fault = version_fault(announced.protocol, "this member", "the hub")
    if fault:
        raise _Refused(400, fault, UPGRADE_HINT)


def _check_caller(request: Request, auth: Auth) -> Caller:
    """Authenticate the caller of a request; refuse it with status 401 if that fails."""
    certificate = request.scope.get(CERTIFICATE, "") if auth.client_ca is not None else ""
    caller = auth.caller(request.headers.get("authorization", ""), certificate)
    CALLER.set(STRANGER if caller is None else caller.name)
    if caller is None:
        # A token that was revoked after the connection was accepted; requests without a token do not get this far.
        audit.warning("event=unauthorized path=%r client=%s", request.url.path, _client(request))
        raise _Refused(401, UNAUTHORIZED.error, UNAUTHORIZED.hint)
    return caller


def _client(request: Request) -> str:
    return request.client.host if request.client else "unix"


def _check_models(operation: Operation, caller: Caller, parameter: str, said: Any) -> None:
    models = tuple(operation.models(said))
    if operation.name == "status":
        models = (parameter,)
    if not caller.may_ask(models):
        audit.warning("event=forbidden operation=%s models=%r", operation.name, ",".join(models))
        about = ", ".join(filter(None, sorted(set(models)))) or "all models"
        raise _Refused(403, f"this token is not for {about}", "use one that the hub's --token-file lists for it")


def _check_life(request: Request, member: str) -> None:
    """Refuse a request with status 403 unless the caller knows the secret of the member that it speaks for."""
    if not hmac.compare_digest(member_of(request.headers.get(LIFE_HEADER, "")).encode(), member.encode()):
        audit.warning("event=impostor path=%r member=%s client=%s", request.url.path, member, _client(request))
        raise _Refused(403, f"this caller is not member {member}", f"show the member's secret as {LIFE_HEADER}")


def _parameter(operation: Operation, request: Request) -> str:
    """Return the member in the path or the model in the query; empty: neither."""
    try:
        if "{member}" in operation.path:
            return msgspec.convert(request.path_params["member"], MemberId)
        if operation.name == "status" and "model" in request.query_params:
            return msgspec.convert(request.query_params["model"], Word)
    except msgspec.ValidationError as error:
        raise _Refused(422, f"{operation.name}: {error}") from error
    return ""


async def _body(request: Request) -> bytes:
    """Read the whole body, with limits on bytes and time."""
    # Starlette's `request.body()` has neither limit: one caller could fill the memory, or hold a request open for ever.
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
        raise _Refused(400, "the caller closed the connection") from error
    return b"".join(parts)


def _map_faults(app: FastAPI, metrics: Metrics) -> None:
    """Register handlers that answer every error with a `Fault` and its status."""

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
