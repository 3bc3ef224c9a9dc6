"""An ASGI app that finds the handler for a request by its path and method, and turns every error into a `Fault`.

This app takes 4 us of CPU time for a trivial request. Starlette's application, which it replaces, takes 15 us.
Source: benchmarks/results/cpu2_202611/hub.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.datastructures import URL
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from penstock.errors import (
    HubUnavailable,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    UnknownMember,
)
from penstock.hub.messages import Fault
from penstock.logs import log_named

_log = log_named("penstock.hub")
Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[object], AbstractAsyncContextManager[None]]

# The first matching class determines the status. Any other error is an internal error of the hub with status 500.
_STATUS: tuple[tuple[type[PenstockError], int], ...] = (
    (UnknownMember, 410),
    (PermissionDenied, 403),
    (PlanError, 409),
    (SourceBusy, 429),
    (HubUnavailable, 503),
)


class RouteRefused(Exception):
    """A response with an error status."""

    def __init__(self, status: int, error: str, hint: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.fault = Fault(error=error, hint=hint)
        self.headers = headers


class HubApp:
    """An ASGI app with routes.

    Args:
        count_refusal: called with the status of each error response.
        on_unauthorized: called with the path and the caller's host when the connection refuses a request without a
            valid token. Such a request never reaches this app.
    """

    def __init__(
        self,
        lifespan: Lifespan | None = None,
        *,
        count_refusal: Callable[[int], None] = lambda status: None,
        on_unauthorized: Callable[[str, str], None] = lambda path, client: None,
    ) -> None:
        self.on_unauthorized = on_unauthorized
        self._count_refusal = count_refusal
        # A Starlette router without routes, which only implements ASGI's lifespan protocol.
        self._router = Router(lifespan=lifespan)
        # Handlers by path and method. The keys of `_parameterized` are paths without their last part, a parameter.
        self._exact: dict[str, dict[str, Handler]] = {}
        self._parameterized: dict[str, tuple[str, dict[str, Handler]]] = {}

    def add_route(self, path: str, handler: Handler, *methods: str) -> None:
        """Add a handler. The path may end with a parameter such as `{name}`. HEAD must be listed explicitly."""
        folder, _, last = path.rpartition("/")
        if last.startswith("{"):
            _, handlers = self._parameterized.setdefault(folder, (last.strip("{}"), {}))
        else:
            handlers = self._exact.setdefault(path, {})
        handlers.update(dict.fromkeys(methods, handler))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._router.lifespan(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await self._handler_of(scope)(request)
        except (RouteRefused, PenstockError) as error:
            response = self._fault(error)
        except Exception:
            # Log the error here, because uvicorn's logger is silenced (`connection`).
            _log.exception("the hub failed at %s %r", request.method, scope["path"])
            await PlainTextResponse("Internal Server Error", 500)(scope, receive, send)
            # Raise the error again, so that uvicorn closes the connection.
            raise
        try:
            await response(scope, receive, send)
        except ClientDisconnect:
            # The caller closed the connection, which is not an error of the hub.
            raise
        except Exception:
            # The response has begun, because a stream's body is produced while it is sent.
            _log.exception("the hub failed in the answer to %s %r", request.method, scope["path"])
            raise

    def _handler_of(self, scope: Scope) -> Handler:
        """Return the handler for a request, and store the parameter in its path. Raise RouteRefused."""
        path, method = scope["path"], scope["method"]
        handlers = self._handlers_of(path, scope)
        if handlers is None:
            without_slash = path.rstrip("/")
            if without_slash != path and self._handlers_of(without_slash, scope) is not None:

                async def redirect(request: Request) -> Response:
                    return RedirectResponse(str(URL(scope={**request.scope, "path": without_slash})))

                return redirect
            raise RouteRefused(404, "Not Found")
        if method not in handlers:
            raise RouteRefused(405, "Method Not Allowed", headers={"Allow": ", ".join(sorted(handlers))})
        return handlers[method]

    def _handlers_of(self, path: str, scope: Scope) -> dict[str, Handler] | None:
        if path in self._exact:
            return self._exact[path]
        folder, _, last = path.rpartition("/")
        if not last or folder not in self._parameterized:
            return None
        name, handlers = self._parameterized[folder]
        scope["path_params"] = {name: last}
        return handlers

    def _fault(self, error: RouteRefused | PenstockError) -> Response:
        # Every refusal is sent here, so that the metrics count it and its body is always a `Fault`.
        headers: dict[str, str] = {}
        if isinstance(error, RouteRefused):
            status, fault = error.status, error.fault
            headers.update(error.headers or {})
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
        else:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            fault = Fault(error=error.message, hint=error.hint or "", kind=type(error).__name__)
            if status == 503:
                # The Retry-After header is for proxies and other clients. Penstock's client retries without the header.
                headers["Retry-After"] = "1"
        self._count_refusal(status)
        return Response(msgspec.json.encode(fault), status, headers, "application/json")
