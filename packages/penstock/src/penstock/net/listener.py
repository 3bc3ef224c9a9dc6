"""Listening sockets with admission control, and accept loops that survive a shortage of descriptors or threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from penstock.errors import PenstockError
from penstock.net.admission import SWEEP_S, Admission, Connection
from penstock.net.unix_sockets import is_same_user, peer_uid
from penstock.waits import start_thread

BACKLOG = 2048
"""Length of the kernel's accept queue, because a thousand members may connect at once."""
CLOSE_S = 5.0
"""Maximum seconds to wait for the accepting thread to exit. This takes less than 1 ms on an idle machine."""
_REFUSED_A_TURN = 64
"""Maximum number of refusals in one `accept`, so that the caller's loop continues. Each costs about 20 us."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def bound_socket(address: str | tuple[str, int]) -> socket.socket:
    """Return a stream socket bound to a path, or to a host and port. Port 0 selects a free port. Raises OSError."""
    if isinstance(address, str):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        bound = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        # Let a restarted member listen immediately, although its old connections are in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class AdmittedSocket(socket.socket):
    """An accepted socket, whose `close` releases its connection in `Admission`. `peer` is empty for a Unix socket."""

    connection: Connection
    peer: str

    def close(self) -> None:
        """Close the socket and release its connection."""
        super().close()
        self.connection.release()


class GuardedListener(socket.socket):
    """A listening socket that accepts only the connections permitted by `Admission`. `accept` never blocks.

    A listener on a Unix socket accepts only its own user. The listener owns the descriptor of `bound`. `refusal`
    is sent on a refused connection before closing it.
    """

    def __init__(self, bound: socket.socket, admission: Admission, *, refusal: bytes = b"") -> None:
        family, kind, proto = bound.family, bound.type, bound.proto
        super().__init__(family, kind, proto, fileno=bound.detach())
        self.setblocking(False)
        self.admission = admission
        self._refusal = refusal
        self._by_descriptor: WeakValueDictionary[int, Connection] = WeakValueDictionary()
        self._spare = -1

    def listen(self, backlog: int = BACKLOG) -> None:
        """Start to listen, or change the backlog of a listening socket."""
        super().listen(backlog)
        if self._spare < 0:
            # Without a spare descriptor, a connection that cannot be accepted would keep waking the loop.
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[AdmittedSocket, Any]:
        """Accept the next permitted connection. Raises BlockingIOError if no connection is waiting."""
        for _ in range(_REFUSED_A_TURN):
            try:
                descriptor, address = self._accept()  # type: ignore[attr-defined]
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self.admission.make_room()
                self._drop_one()
                continue
            sock = AdmittedSocket(self.family, self.type, self.proto, fileno=descriptor)
            connection = self._admit(sock, address)
            if connection is not None:
                self._by_descriptor[descriptor] = connection
                return sock, address
            # On a Unix socket, send nothing to another user, because it would reveal that a process listens here.
            if self._refusal and (sock.family != socket.AF_UNIX or is_same_user(sock)):
                with contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(self._refusal)
            # Do not call AdmittedSocket.close, which would release a connection.
            socket.socket.close(sock)
        raise BlockingIOError(errno.EAGAIN, f"{_REFUSED_A_TURN} connections were refused in this turn")

    def _admit(self, sock: AdmittedSocket, address: Any) -> Connection | None:
        if sock.family == socket.AF_UNIX:
            if not is_same_user(sock):
                self.admission.report(
                    f"a connection of user {peer_uid(sock)} was refused, who does not own this socket"
                )
                return None
            sock.peer = ""
        else:
            sock.peer = str(address[0])
            # Without TCP_NODELAY, the second packet of a response waits 40 ms for a delayed ACK, even with asyncio.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self.admission.admit(sock.peer or "unix", partial(cut, sock))
        if connection is not None:
            sock.connection = connection
            # The kernel has authenticated the peer of a Unix socket.
            if sock.family == socket.AF_UNIX and not connection.prove("unix"):
                connection.release()
                return None
        return connection

    def _drop_one(self) -> None:
        self._close_spare()
        with contextlib.suppress(OSError):
            descriptor, _ = self._accept()  # type: ignore[attr-defined]
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def connection_of(self, descriptor: int) -> Connection:
        """Return the `Connection` for an accepted socket, given its file descriptor."""
        return self._by_descriptor[descriptor]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self.fileno() >= 0:
            super().close()
            self._close_spare()


Serve = Callable[[socket.socket, Connection, str], None]
"""Serves a connection until it is closed. Called with the socket (with TLS if configured), `Connection` and host."""


class ThreadedListener:
    """A server that runs each connection in its own thread, from `start` to `close`.

    Args:
        bound: a bound socket. This object owns the socket from now on.
        serve: called in the connection's thread, before the socket is closed. An OSError ends only this connection.
        refusal: see `GuardedListener`.
    """

    def __init__(
        self,
        bound: socket.socket,
        admission: Admission,
        serve: Serve,
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
        refusal: bytes = b"",
    ) -> None:
        self.admission = admission
        self._listener = GuardedListener(bound, admission, refusal=refusal)
        self._serve = serve
        self._name = name
        self._tls = tls
        self._is_open = True
        self.address: Any = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Listen, and accept connections in a new thread. Raises DestinationError if no thread can be started."""
        self._listener.listen()
        try:
            start_thread(self._thread)
        except PenstockError:
            self._listener.close()
            raise

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        with self._listener:
            while self._is_open:
                poll.poll(SWEEP_S * 1000 if self.admission.num_open else None)
                self.admission.sweep()
                try:
                    self._start(self._listener.accept()[0])
                except BlockingIOError:
                    continue
                except OSError:
                    # The client has already disconnected, or the kernel is short of memory. Pause to avoid a busy loop.
                    if self._is_open:
                        time.sleep(0.05)

    def _start(self, sock: AdmittedSocket) -> None:
        sock.setblocking(True)
        thread = threading.Thread(target=self._connection, args=(sock,), name=self._name, daemon=True)
        try:
            start_thread(thread)
        except PenstockError as error:
            self.admission.report(f"a connection was refused: {error.message}")
            sock.close()

    def _connection(self, sock: AdmittedSocket) -> None:
        connection, peer = sock.connection, sock.peer
        served: socket.socket = sock
        try:
            if self._tls is not None:
                sock.settimeout(self.admission.limits.head_s)
                # `cut` must shut down the socket that owns the descriptor, so wrap the socket before the handshake.
                served = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection.cut = partial(cut, served)
                served.do_handshake()
            self._serve(served, connection, peer)
        except PenstockError:
            # Some errors from the handler are also OSErrors.
            raise
        except OSError:
            return
        finally:
            served.close()
            connection.release()

    def close(self) -> None:
        """Stop accepting. Open connections continue. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(OSError):
            # The shutdown wakes the thread, even if a forked child has a copy of the socket.
            self._listener.shutdown(socket.SHUT_RDWR)
        # The thread itself closes the socket. Otherwise the descriptor could refer to another file at the next `poll`.
        if self._thread.ident is None:
            self._listener.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def forget(self) -> None:
        """In a forked child, close the copy of the listening socket."""
        self._is_open = False
        self.admission.forget()
        self._listener.close()


def cut(sock: socket.socket) -> None:
    """Abort a connection, from any thread, even while other threads use it."""
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would drop the TLS state, and a receiver in another thread would return ciphertext.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


ACCEPTS_A_TURN = 10
"""Number of connections to accept before open connections are served again."""
PAUSE_S = 0.01
"""Pause in seconds after `ACCEPTS_A_TURN` connections, for at most 1,000 a second. The kernel queues the others."""


class Acceptor:
    """An asyncio accept loop with a rate limit. Call `start` and `close` in the event loop's thread.

    `loop.create_server` would accept whenever the listener is readable. In a flood, each iteration of the event loop
    would begin with dozens of new connections, and requests on open connections would wait for all of them.
    """

    def __init__(
        self, listener: GuardedListener, make_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        # Keep the tasks here, because the event loop has only weak references to them.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True

    def start(self) -> None:
        """Start or resume accepting."""
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting. Open connections continue. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # The kernel is short of memory, or the listener is closed.
                break
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_S, self.start)

    async def _connect(self, sock: socket.socket) -> None:
        # A failed TLS handshake affects only the peer, which detects the failure itself.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make_protocol, sock, ssl=self._context)
