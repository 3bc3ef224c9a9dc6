"""The HTTP endpoint at which Prometheus reads the metrics of this process, and probes read its start.

In: an address and a file of tokens. Out: `GET /metrics` and `GET /v1/phases`, for callers that show one of these
tokens; `GET /v1/ready`, for all.
Not here: the metrics (`metrics`), the phases (`http.phases`), the hub's own endpoint (`hub.app`).

One endpoint a process, for everything in it: a process may load, hold models as several members, and publish. It is not
a path of a member's server, which may listen on a Unix socket only, ends with its member, and gives readers' places to
callers that have a grant.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from penstock.arguments import require_type
from penstock.config import MetricsAddress, Settings, asks_for_metrics, metrics_address
from penstock.errors import ConfigError, MissingExtra
from penstock.http.phases import PhasesHandler, answer_ready
from penstock.http.server import HttpServer, RequestRefused, ServerExchange
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.net.listener import bound_socket
from penstock.telemetry.metrics import Registry, start_recording

MAX_TOKENS_BYTES = 64 << 10
MIN_TOKEN = 16
"""Characters of the shortest token, as at the hub."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

log = log_named("penstock.metrics")


class MetricsEndpoint(Closeable):
    """The endpoint of this process. Made by `serve_metrics`; a context manager.

    Attributes:
        url: where Prometheus reads it: `http://host:port/metrics`.
    """

    url: str
    _server: HttpServer

    def __init__(self, token_file: Path, registry: Registry) -> None:
        self._token_file = token_file
        self._registry = registry
        self._fault = ""
        self._pid = os.getpid()
        self._phases = PhasesHandler(lambda boot: boot)

    @classmethod
    def start(cls, address: MetricsAddress, token_file: Path) -> MetricsEndpoint:
        """Listen at the first free port of the address, and serve; raises as `serve_metrics`."""
        # Read here too: a file without a token should fail at the start, and not at each scrape.
        read_tokens(token_file)
        endpoint = cls(token_file, start_recording())
        refusal: Exception | None = None
        bound = None
        # The processes of a host, as the ranks of an engine, share one setting: each takes the next free port.
        for port in range(address.first_port, address.last_port + 1):
            try:
                bound = bound_socket((address.host, port))
                # Now: two sockets may be bound to one port while neither listens.
                bound.listen()
                break
            except (OSError, OverflowError) as error:
                refusal = error
        if bound is None:
            raise ConfigError(
                f"metrics cannot be served at {address}: {refusal}",
                hint="give an address of this host, and a range of ports if it has several processes: HOST:9464-9479",
            ) from refusal
        endpoint._server = HttpServer(
            bound,
            endpoint._answer,
            name="metrics",
            thread_name="penstock-metrics",
            full_status=HTTPStatus.SERVICE_UNAVAILABLE,
            tls=None,
        )
        host, port = endpoint._server.address[:2]
        endpoint.url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        endpoint._server.start()
        return endpoint

    @property
    def is_ours(self) -> bool:
        """Return False in a forked child, which has no endpoint: the sockets are its parent's."""
        return self._pid == os.getpid()

    def _answer(self, exchange: ServerExchange) -> None:
        path, _, query = exchange.head.target.partition("?")
        if path == "/v1/ready" and exchange.head.method == "GET":
            answer_ready(exchange)
            return
        if not self._is_allowed(exchange.head.headers.get("authorization", "")):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED)
        # A stranger cannot take this connection's place any more.
        exchange.prove()
        if path not in {"/metrics", "/v1/phases"}:
            raise RequestRefused(HTTPStatus.NOT_FOUND, closes=False)
        if exchange.head.method != "GET":
            raise RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED)
        if path == "/v1/phases":
            # By a digest: what counts streams for each caller must not hold tokens.
            caller = hashlib.sha256(exchange.head.headers["authorization"].encode()).hexdigest()
            self._phases.answer(exchange, parse_qs(query, keep_blank_values=True), caller)
            return
        page = self._registry.page()
        # With its type: Prometheus 3 refuses an answer that does not name its format.
        exchange.begin_answer(len(page), f"Content-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(page)}\r\n")
        exchange.wire.send_all(page)

    def _is_allowed(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        try:
            # Read for each scrape, every few seconds: a token is changed without a restart.
            valid = read_tokens(self._token_file)
        except ConfigError as error:
            # Once for each fault: any caller can cause this line.
            if self._fault != str(error):
                self._fault = str(error)
                log.warning("metrics are refused to every caller: %s", error)
            return False
        self._fault = ""
        # Every token is compared, so that the time does not tell which one was nearly right.
        return sum(hmac.compare_digest(token.strip().encode(), one) for one in valid) > 0

    def close(self) -> None:
        """Stop listening. The metrics go on counting. Idempotent."""
        self._server.close()
        global _endpoint
        with _lock:
            if _endpoint is self:
                _endpoint = None


def read_tokens(path: Path) -> list[bytes]:
    """Return the tokens of a file: the first word of each line, without comments.

    Raises:
        ConfigError: it cannot be read, has no token, or has one that is too short. The message has no token.
    """
    hint = "a token a line: `openssl rand -hex 32` makes one"
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_TOKENS_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(f"metrics token file {path} cannot be read: {error.strerror}", hint=hint) from error
    tokens = [words[0] for line in lines if (words := line.partition(b"#")[0].split())]
    if not tokens or min(map(len, tokens)) < MIN_TOKEN:
        what = f"a token of fewer than {MIN_TOKEN} characters" if tokens else "no token"
        raise ConfigError(f"metrics token file {path} has {what}", hint=hint)
    return tokens


# The lock guards both.
_lock = threading.Lock()
_endpoint: MetricsEndpoint | None = None
_refused_in = 0
"""The process that has tried to serve by its environment, and could not: it is told once."""


def serve_metrics(listen: str | None = None, *, token_file: str | os.PathLike[str] | None = None) -> MetricsEndpoint:
    """Serve the metrics of this process for Prometheus, until the endpoint is closed or the process ends.

    Journeys and members are counted from then on. Without a call, the first verb starts the endpoint if
    `PENSTOCK_METRICS` is set.

    Args:
        listen: `host:port`, port 0 for a free one, or `host:first-last` for the first free port of a range; None:
            `PENSTOCK_METRICS`.
        token_file: file of the tokens of which a caller must show one (`Authorization: Bearer`), one a line, read for
            each request; None: `PENSTOCK_METRICS_TOKEN_FILE`.

    Raises:
        ConfigError: there is no address or no token, the address cannot be bound, or this process serves metrics
            already. MissingExtra: prometheus-client is not installed.
    """
    require_type("listen", listen, (str, type(None)), "host:port, or None")
    settings = Settings.read()
    address = settings.metrics if listen is None else metrics_address(listen)
    path = settings.metrics_token_file if token_file is None else Path(token_file)
    if address is None:
        raise ConfigError("no address to serve metrics at", hint="give listen=, or set PENSTOCK_METRICS")
    return _serve(address, path)


def _serve(address: MetricsAddress, token_file: Path | None) -> MetricsEndpoint:
    global _endpoint
    # On loopback too: every user of the host can connect to it, and the metrics name models.
    if token_file is None:
        hint = "give token_file=, or set PENSTOCK_METRICS_TOKEN_FILE; `openssl rand -hex 32 > FILE` makes one"
        raise ConfigError(f"metrics at {address} need a token", hint=hint)
    with _lock:
        if _endpoint is not None and _endpoint.is_ours:
            hint = "a process has one endpoint, for all that it does; close the other one first"
            raise ConfigError(f"this process serves its metrics at {_endpoint.url} already", hint=hint)
        _endpoint = MetricsEndpoint.start(address, token_file)
        log.info("metrics at %s", _endpoint.url)
        return _endpoint


def start_configured() -> None:
    """Serve metrics if the environment says so and this process does not yet; log a warning if it cannot.

    Raises:
        ConfigError: the setting is incomplete: it has no token.
    """
    global _refused_in
    if not asks_for_metrics() or (_endpoint is not None and _endpoint.is_ours) or _refused_in == os.getpid():
        return
    settings = Settings.read()
    assert settings.metrics is not None
    try:
        _serve(settings.metrics, settings.metrics_token_file)
    except MissingExtra:
        raise
    except ConfigError as error:
        if _endpoint is not None and _endpoint.is_ours:
            return  # another thread was first
        if settings.metrics_token_file is None:
            raise
        # A warning: a command that runs beside an engine, in its environment, should work although the port is taken.
        _refused_in = os.getpid()
        log.warning("%s", error)
