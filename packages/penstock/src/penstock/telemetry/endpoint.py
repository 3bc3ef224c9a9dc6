"""The HTTP endpoint where Prometheus reads the metrics of this process and probes read its phases.

`GET /metrics` and `GET /v1/phases` require a token from a file. `GET /v1/ready` does not. The endpoint is separate from
a member's server, because that server may listen only on a Unix socket, stops with its member, and admits only readers
with a grant.
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
"""Minimum length of a token in characters, equal to the hub's minimum."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

log = log_named("penstock.metrics")


class MetricsEndpoint(Closeable):
    """The metrics endpoint of this process, a context manager that `serve_metrics` creates.

    Attributes:
        url: address for Prometheus, `http://host:port/metrics`.
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
        """Listen on the first free port of the address, and serve. Raise the errors of `serve_metrics`."""
        # Read the file now, so that a file without a token fails at the start and not at each scrape.
        read_tokens(token_file)
        endpoint = cls(token_file, start_recording())
        refusal, bound = None, None
        # Processes on a host, such as the ranks of an engine, share one setting. Each process uses the next free port.
        for port in range(address.first_port, address.last_port + 1):
            try:
                bound = bound_socket((address.host, port))
                # Listen immediately, because two sockets can bind to the same port as long as neither socket listens.
                bound.listen()
                break
            except (OSError, OverflowError) as error:
                refusal = error
        if bound is None:
            raise ConfigError(
                f"cannot serve metrics at {address}: {refusal}",
                hint="use an address of this host, and a range of ports for several processes, such as HOST:9464-9479",
            ) from refusal
        endpoint._server = HttpServer(
            bound,
            endpoint._respond,
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
        """Return whether this process created the endpoint, because a forked child inherits the endpoint's sockets."""
        return self._pid == os.getpid()

    def _respond(self, exchange: ServerExchange) -> None:
        path, _, query = exchange.head.target.partition("?")
        if path == "/v1/ready" and exchange.head.method == "GET":
            answer_ready(exchange)
            return
        if not self._is_allowed(exchange.head.headers.get("authorization", "")):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED)
        # The caller is authenticated, so other callers cannot displace this connection.
        exchange.prove()
        if path not in {"/metrics", "/v1/phases"}:
            raise RequestRefused(HTTPStatus.NOT_FOUND, closes=False)
        if exchange.head.method != "GET":
            raise RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED)
        if path == "/v1/phases":
            # Count streams by the token's digest, because tokens must not be stored.
            caller = hashlib.sha256(exchange.head.headers["authorization"].encode()).hexdigest()
            self._phases.answer(exchange, parse_qs(query, keep_blank_values=True), caller)
            return
        page = self._registry.page()
        # Prometheus 3 refuses a response without a content type.
        exchange.begin_answer(len(page), f"Content-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(page)}\r\n")
        exchange.wire.send_all(page)

    def _is_allowed(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        try:
            # Read the file for each scrape, so that tokens can be changed without a restart.
            valid = read_tokens(self._token_file)
        except ConfigError as error:
            # Do not log the same fault repeatedly, because any caller can trigger this line.
            if self._fault != str(error):
                self._fault = str(error)
                log.warning("every request for metrics is refused: %s", error)
            return False
        self._fault = ""
        # Compare with all tokens, so that the time does not reveal a partial match.
        return sum(hmac.compare_digest(token.strip().encode(), one) for one in valid) > 0

    def close(self) -> None:
        """Stop listening. The process continues to count metrics. Idempotent."""
        self._server.close()
        global _endpoint
        with _lock:
            if _endpoint is self:
                _endpoint = None


def read_tokens(path: Path) -> list[bytes]:
    """Return the tokens in a file: the first word of each line, where `#` begins a comment. Raise ConfigError."""
    hint = "write one token per line, for example from `openssl rand -hex 32`"
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_TOKENS_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the metrics token file {path}: {error.strerror}", hint=hint) from error
    tokens = [words[0] for line in lines if (words := line.partition(b"#")[0].split())]
    if not tokens or min(map(len, tokens)) < MIN_TOKEN:
        what = f"a token of fewer than {MIN_TOKEN} characters" if tokens else "no token"
        raise ConfigError(f"the metrics token file {path} has {what}", hint=hint)
    return tokens


# The lock guards both variables.
_lock = threading.Lock()
_endpoint: MetricsEndpoint | None = None
_refused_in = 0
"""Id of the process that failed to serve the configured metrics. The failure is logged once per process."""


def serve_metrics(listen: str | None = None, *, token_file: str | os.PathLike[str] | None = None) -> MetricsEndpoint:
    """Serve the metrics of this process for Prometheus, until the endpoint is closed or the process ends.

    The endpoint and counting start with this call, or with the first journey if `PENSTOCK_METRICS` is set.

    Args:
        listen: `host:port`, where port 0 means any free port, or `host:first-last` for the first free port in a range.
            None means `PENSTOCK_METRICS`.
        token_file: file with one token per line, read for each request. A caller must send a token as `Authorization:
            Bearer`. None means `PENSTOCK_METRICS_TOKEN_FILE`.

    Raises:
        ConfigError: the address or the token is missing, the address cannot be bound, or this process already serves
            metrics.
        MissingExtra: prometheus-client is not installed.
    """
    require_type("listen", listen, (str, type(None)), "host:port, or None")
    settings = Settings.read()
    address = settings.metrics if listen is None else metrics_address(listen)
    path = settings.metrics_token_file if token_file is None else Path(token_file)
    if address is None:
        raise ConfigError("there is no address for the metrics endpoint", hint="pass listen=, or set PENSTOCK_METRICS")
    return _serve(address, path)


def _serve(address: MetricsAddress, token_file: Path | None) -> MetricsEndpoint:
    global _endpoint
    # Loopback also requires a token, because every user of the host can connect and the metrics contain model names.
    if token_file is None:
        hint = "pass token_file= or set PENSTOCK_METRICS_TOKEN_FILE. Create the file with `openssl rand -hex 32 > FILE`"
        raise ConfigError(f"the metrics endpoint at {address} requires a token", hint=hint)
    with _lock:
        if _endpoint is not None and _endpoint.is_ours:
            hint = "a process has one endpoint, so close the existing one first"
            raise ConfigError(f"this process already serves its metrics at {_endpoint.url}", hint=hint)
        _endpoint = MetricsEndpoint.start(address, token_file)
        log.info("metrics at %s", _endpoint.url)
        return _endpoint


def start_configured() -> None:
    """Serve the configured metrics, unless this process already serves metrics. Log a warning on failure.

    Raises:
        ConfigError: the environment has an address but no token.
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
            return
        if settings.metrics_token_file is None:
            raise
        # Only warn, because a command run in an engine's environment should work even if the engine uses the port.
        _refused_in = os.getpid()
        log.warning("%s", error)
