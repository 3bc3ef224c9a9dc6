"""An ASGI app that finds the function for a request by its method and path, and answers every error with a `Fault`.

In: functions that take a request and return a response, both of Starlette. Out: the app, for uvicorn.
Not here: the operations (`app`), the fleet page (`page`), connections and their limits (`connection`).

Starlette's own application is not used: for a request without work, FastAPI takes 23 us of processor time, Starlette 15
(two middlewares, two handlers of exceptions inside each other, a list of routes with a regular expression each), and
this app 4. A beat takes 65 us in the app, and took 104. Source: benchmarks/results/cpu2_202611/hub.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec

from penstock.entry_points import install_hint
from penstock.errors import (
    HubUnavailable,
    MissingExtra,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    UnknownMember,
)
from penstock.hub.messages import Fault
from penstock.logs import log_named

try:
    from starlette.datastructures import URL
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Router
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingExtra(f"the hub needs Starlette, whose import failed: {error}", hint=install_hint("hub")) from error

_log = log_named("penstock.hub")
Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[object], AbstractAsyncContextManager[None]]

# In this order: the first kind that fits. Whatever is not listed is the hub's own fault, 500.
_STATUS: tuple[tuple[type[PenstockError], int], ...] = (
    (UnknownMember, 410),
    (PermissionDenied, 403),
    (PlanError, 409),
    (SourceBusy, 429),
    (HubUnavailable, 503),
)


class RouteRefused(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, error: str, hint: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.fault = Fault(error=error, hint=hint)
        self.headers = headers


class HubApp:
    """An ASGI app of routes.

    Args:
        lifespan: runs from before the first request until after the last one.
        count_refusal: called with the status of each answer that is a fault.
        on_unauthorized: called with the path and the caller's host when a connection refuses a caller without a good
            token, before its request gets here.
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
        # Starlette's router only for its side of ASGI's lifespan protocol; it has no routes.
        self._router = Router(lifespan=lifespan)
        # Path -> method -> handler. The second has paths that end in a parameter, by what comes before its slash.
        self._exact: dict[str, dict[str, Handler]] = {}
        self._parameterized: dict[str, tuple[str, dict[str, Handler]]] = {}

    def add_route(self, path: str, handler: Handler, *methods: str) -> None:
        """Add a handler.

        Args:
            path: its last part may be a parameter, `{name}`, which the handler finds in `request.path_params`.
            handler: answers. May raise `RouteRefused`, or a `PenstockError`, whose kind decides on the status.
            methods: of HTTP; HEAD only if it is listed.
        """
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
            # Here, because uvicorn's log of it is silenced (`connection`): that has a line for every malformed request.
            _log.exception("the hub failed at %s %r", request.method, scope["path"])
            await PlainTextResponse("Internal Server Error", 500)(scope, receive, send)
            # uvicorn then closes the connection.
            raise
        try:
            await response(scope, receive, send)
        except ClientDisconnect:
            # Its caller has gone, which is no fault.
            raise
        except Exception:
            # The body of a stream is made while it is sent.
            _log.exception("the hub failed in the answer to %s %r", request.method, scope["path"])
            raise

    def _handler_of(self, scope: Scope) -> Handler:
        """Return the handler of a request, and note the parameter of its path.

        Raises:
            Refused: the path is unknown, or does not have this method.
        """
        path, method = scope["path"], scope["method"]
        handlers = self._handlers_of(path, scope)
        if handlers is None:
            without_slash = path.rstrip("/")
            if without_slash != path and self._handlers_of(without_slash, scope) is not None:
                return _redirect_to(without_slash)
            raise RouteRefused(404, "Not Found")
        if method not in handlers:
            raise RouteRefused(405, "Method Not Allowed", headers={"Allow": ", ".join(sorted(handlers))})
        return handlers[method]

    def _handlers_of(self, path: str, scope: Scope) -> dict[str, Handler] | None:
        """Return the handlers of a path by method; None: the path is unknown."""
        if path in self._exact:
            return self._exact[path]
        folder, _, last = path.rpartition("/")
        if not last or folder not in self._parameterized:
            return None
        name, handlers = self._parameterized[folder]
        scope["path_params"] = {name: last}
        return handlers

    def _fault(self, error: RouteRefused | PenstockError) -> Response:
        """Return the answer to an error."""
        # Every refusal comes through here, so that the metrics count it and its body is always a fault.
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
                # For proxies and foreign clients; ours tries again by itself.
                headers["Retry-After"] = "1"
        self._count_refusal(status)
        return Response(msgspec.json.encode(fault), status, headers, "application/json")


def _redirect_to(path: str) -> Handler:
    """Return a handler that sends the caller to another path of this app."""

    async def redirect(request: Request) -> Response:
        return RedirectResponse(str(URL(scope={**request.scope, "path": path})))

    return redirect
