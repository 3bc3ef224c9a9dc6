"""The hub's server and its socket, in this process's main thread or in a separate thread."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import secrets
import signal
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from penstock import descriptors
from penstock.errors import ConfigError, HubUnavailable
from penstock.lifecycle import release_after_fork
from penstock.logs import log_named
from penstock.net.admission import Admission, ConnectionLimits
from penstock.net.listener import BACKLOG, Acceptor, GuardedListener
from penstock.net.unix_sockets import connect_unix
from penstock.waits import start_thread
from penstock_hub.app import MemberClient, create_app, create_page_app
from penstock_hub.auth import Auth
from penstock_hub.connection import protocol_for
from penstock_hub.directory import Directory
from penstock_hub.routes import HubApp
from penstock_hub.store import MemoryStore, RunningTimeClock

# Deadline for a start. Importing Starlette and uvicorn on a busy machine takes some seconds.
_START_S = 20.0
# Deadline for a stop. A running request has 2 s (`timeout_graceful_shutdown`), and its connection slightly longer.
_STOP_S = 5.0
# Maximum number of expired connections that a tick of uvicorn (0.1 s) closes. Closing thousands would block the loop.
_CUTS_A_TICK = 100
# Seconds for which an idle connection stays open, which is several heartbeat intervals.
_KEEP_ALIVE_S = 75
# Arguments of `gc.set_threshold`. A hub's state contains no reference cycles, so collections find only cycles of closed
# connections. With a threshold of 100,000 the slowest heartbeat of 1,000 members fell from 58 to 5 ms
# (benchmarks/results/cpu2_202611/hub.md). 20,000 objects of closed connections take about 2 MB.
_GC_THRESHOLD = (20_000, 50, 100)
# Timeout for connecting to a hub that may already exist. The connection waits if the hub's accept queue is full.
_PROBE_S = 1.0
_log = log_named("penstock.hub")


def bind(listen: str, auth: Auth) -> socket.socket:
    """Open a listening socket.

    Args:
        listen: `unix:///path`, `host:port` or `[v6]:port`. Port 0 selects a free port.
        auth: must require a token or a certificate, unless the address is a Unix socket.

    Raises:
        ConfigError: the address is invalid or in use, or its callers would not have to authenticate.
    """
    if listen.startswith("unix://"):
        return _bind_unix(Path(listen.removeprefix("unix://")))
    # An IPv6 address in brackets contains colons, so split from the right.
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host and port.isdecimal() and int(port) > 65535:
        raise ConfigError(f"cannot listen on {listen!r}: port {port} is invalid", hint="use a port from 0 to 65535")
    if not port.isdecimal() or not host:
        raise ConfigError(f"cannot listen on {listen!r}: not a valid address", hint="use host:port or unix:///path")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen!r}: {error}") from error
    family, _, _, _, address = addresses[0]
    # Every user of this host can connect to loopback too.
    if not auth.guards:
        raise ConfigError(
            f"anyone who can reach {listen}, even other users of this host, could use the hub without authentication",
            hint="pass --token-file or --client-ca, or listen on unix:///path, which only this user can connect to",
        )
    if auth.tokens and auth.certificate is None and not ipaddress.ip_address(str(address[0])).is_loopback:
        _log.warning("clients send tokens to %s unencrypted. Set --cert and --key to encrypt them.", listen)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted hub must not wait until the kernel drops the previous hub's connections.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        hint = "use an address of this host. Port 0 selects a free port."
        raise ConfigError(f"cannot listen on {listen!r}: {error}", hint=hint) from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    """Open a socket for this user only. Remove a dead socket at the same path."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A socket's file remains after its process exits. Remove it only if no process listens on it.
        if path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode) or _is_listening(path):
                raise ConfigError(f"cannot listen on unix://{path}: the path is in use", hint="choose another path")
            path.unlink()
        # Set the mode before bind, because the socket would otherwise be open to other users for a moment.
        os.fchmod(bound.fileno(), 0o600)
        bound.bind(os.fspath(path))
        bound.listen(BACKLOG)
    except (OSError, ConfigError) as error:
        bound.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot listen on unix://{path}: {error}") from error
    return bound


def _is_listening(path: Path) -> bool:
    try:
        connect_unix(os.fspath(path), _PROBE_S).close()
    except (TimeoutError, PermissionError):
        # Either the process is too busy to accept, or another user's process is listening on this address.
        return True
    except OSError:
        return False
    return True


def url_of(bound: socket.socket, auth: Auth) -> str:
    """Return the address of a bound socket in the form that `ConnectionSettings.hub` accepts."""
    if bound.family == socket.AF_UNIX:
        return f"unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    scheme = "http" if auth.certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _refusal(auth: Auth) -> bytes:
    """Return the response to a connection above the limit. Members then retry."""
    # On a TLS connection a plain-text response would be a protocol error, so close the connection without one.
    if auth.certificate is not None:
        return b""
    return b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def _server(make_app: Callable[[], HubApp], auth: Auth, listener: GuardedListener) -> uvicorn.Server:
    """Return a server for a listener. The server is not started yet."""
    app = make_app()
    config = uvicorn.Config(
        app,
        # uvloop accepts connections without the listener's limits.
        loop="asyncio",
        http=protocol_for(listener, auth, app.on_unauthorized),
        # A local hub is a thread in a user's program, so do not configure logging.
        log_config=None,
        log_level="warning",
        # Lines for heartbeats would fill the log. Important events are in the audit log.
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        ssl_certfile=auth.certificate,
        ssl_keyfile=auth.private_key,
        ssl_ca_certs=None if auth.client_ca is None else os.fspath(auth.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if auth.client_ca is None else ssl.CERT_REQUIRED,
    )
    # Load the certificates here and not in the server's thread, so that the caller gets the error.
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the hub's certificate: {error}") from error

    class Server(uvicorn.Server):
        _acceptor: Acceptor

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # If uvicorn opened the socket, it would accept connections without the listener's limits.
            await super().startup(sockets=[])

            def make_protocol() -> asyncio.Protocol:
                protocol: Any = config.http_protocol_class
                connection: asyncio.Protocol = protocol(
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                )
                return connection

            self._acceptor = Acceptor(listener, make_protocol, config.ssl)
            self._acceptor.start()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._acceptor.close()
            listener.close()
            await super().shutdown(sockets=[])

        async def on_tick(self, counter: int) -> bool:
            listener.admission.sweep(most=_CUTS_A_TICK)
            return await super().on_tick(counter)

    return Server(config)


def run_page(hub: MemberClient, port: int, *, ready: Callable[[str], None]) -> None:
    """Serve the fleet page on loopback until SIGINT or SIGTERM, for a browser that cannot connect to the hub.

    Args:
        hub: executes the page's requests with this client's token.
        port: port on 127.0.0.1, or 0 for a free port.
        ready: called once the socket listens, with the page's URL, whose fragment is the token that the page sends.

    Raises:
        ConfigError: the port is in use.
    """
    # Every user of this host can connect to loopback, so the page requires a token.
    with tempfile.TemporaryDirectory() as directory:
        token = secrets.token_urlsafe(24)
        token_file = Path(directory) / "token"
        token_file.write_text(f"{token}\n", encoding="utf-8")
        auth = Auth.of(token_file=token_file)
        _run(lambda: create_page_app(hub, auth), f"127.0.0.1:{port}", auth, ready=lambda url: ready(f"{url}/#{token}"))


def run_hub(directory: Directory, listen: str, auth: Auth | None = None, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish running requests and return. SIGHUP reads the token file again.

    Only the main thread can call this function. `ready` is called with the URL once the socket listens.

    Raises:
        ConfigError: the address or a certificate is wrong.
        ModuleNotFoundError: prometheus-client is not installed.
    """
    # Without this import, a missing package would be reported only by the first request for metrics.
    import prometheus_client  # noqa: F401

    auth = auth or Auth()
    _run(lambda: create_app(directory, auth), listen, auth, ready=ready)


def _run(make_app: Callable[[], HubApp], listen: str, auth: Auth, *, ready: Callable[[str], None]) -> None:
    bound = bind(listen, auth)
    limits = ConnectionLimits.for_descriptors(descriptors.raise_limit(), idle_s=_KEEP_ALIVE_S)
    url = url_of(bound, auth)
    listener = GuardedListener(bound, Admission(limits, name="hub"), refusal=_refusal(auth))
    try:
        listener.listen()
        server = _server(make_app, auth, listener)
    except BaseException:
        listener.close()
        raise
    # This process runs nothing but a hub, so changing its garbage collection affects no other code.
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    def reread(number: int, frame: FrameType | None) -> None:
        if auth.token_file is not None:
            auth.token_file.reread()

    # uvicorn stops at a signal and raises the signal again for the previous handler, which must not end the process.
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reread}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        ready(url)
        server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()
        if listen.startswith("unix://"):
            Path(listen.removeprefix("unix://")).unlink(missing_ok=True)


# A forked child closes the socket, because a child that outlives the hub would keep the socket open.
_CLOSED_IN_CHILDREN = release_after_fork(GuardedListener.close)


def serve_in_thread(listen: str, *, seed: bytes, fresh: bool, beat_s: float, ttl_s: float) -> Callable[[], None]:
    """Start a hub with a directory in memory in a thread of this process, and return the function that stops it.

    Args:
        listen: as for `bind`. The address must be a Unix socket, because the hub admits every caller.
        seed: key with which the hub signs grants.
        fresh: whether no member has reached an earlier hub, so that there are no reports to wait for.
        beat_s: heartbeat interval of members in seconds.
        ttl_s: seconds without a heartbeat after which a member is lost.
    """
    # The process also does other work and may be stopped for longer than `ttl_s`. With a wall clock all members would
    # then expire.
    store = MemoryStore(RunningTimeClock(most_s=2 * beat_s))
    hub = HubThread(Directory(store, fresh=fresh, beat_s=beat_s, ttl_s=ttl_s, seed=seed), bind(listen, Auth()))
    try:
        hub.start()
    except BaseException:
        hub.stop()
        raise
    return hub.stop


class HubThread:
    """A hub that runs in a thread of this process and owns its listening socket."""

    def __init__(
        self,
        directory: Directory,
        bound: socket.socket,
        auth: Auth | None = None,
        *,
        limits: ConnectionLimits | None = None,
    ) -> None:
        auth = auth or Auth()
        self.url = url_of(bound, auth)
        # The rest of this process also uses descriptors, so use only half of them.
        limits = limits or ConnectionLimits.for_descriptors(descriptors.limit() // 2, idle_s=_KEEP_ALIVE_S)
        self._listener = GuardedListener(bound, Admission(limits, name="hub"), refusal=_refusal(auth))
        _CLOSED_IN_CHILDREN.add(self._listener)
        try:
            self._server = _server(lambda: create_app(directory, auth), auth, self._listener)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._server.run, name="penstock-hub", daemon=True)

    def start(self) -> None:
        """Start the thread, and return once the hub accepts requests. Raise HubUnavailable if the start fails."""
        self._listener.listen()
        start_thread(self._thread)
        deadline = time.monotonic() + _START_S
        # uvicorn only sets an attribute when it has started, so poll.
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HubUnavailable("the hub's thread did not start", uri=self.url)
            time.sleep(0.002)

    def stop(self) -> None:
        """Finish running requests, then stop within some seconds. Idempotent."""
        self._server.should_exit = True
        # A finalizer in the hub's thread may call this method, and a thread cannot wait for itself.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
        self._listener.close()
