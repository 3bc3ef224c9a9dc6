"""Listening sockets with admission control, and accept loops that survive a shortage of descriptors or threads.

In: a bound socket, an `Admission`. Out: admitted sockets, each in a thread of its own or in an asyncio loop.
Not here: the limits (`admission`), requests and answers (each server).

    GuardedListener.accept: admitted, or refused and closed -+-> ThreadedListener: a thread for each (members)
                                                             +-> Acceptor: an asyncio protocol for each (hub)
"""

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
from typing import Any
from weakref import WeakValueDictionary

from penstock.errors import PenstockError
from penstock.net.admission import SWEEP_S, Admission, Connection
from penstock.net.unix_sockets import is_same_user, peer_uid
from penstock.waits import start_thread

BACKLOG = 2048
"""Length of the kernel's accept queue: a thousand members may connect at the same moment. The kernel caps it at
net.core.somaxconn."""
CLOSE_S = 5.0
"""Longest wait for the accepting thread when a listener is closed; it needs less than 1 ms on an idle machine."""
_REFUSED_A_TURN = 64
"""Connections refused in one call of `accept`, so that the caller's loop runs again; each costs about 20 us."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def bound_socket(address: str | tuple[str, int]) -> socket.socket:
    """Return a stream socket bound to a path, or to a host and a port; port 0 takes a free one.

    Raises:
        OSError, OverflowError: it cannot be bound.
    """
    if isinstance(address, str):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        bound = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        # A member that starts again listens at once, although connections of its previous life are in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class AdmittedSocket(socket.socket):
    """An accepted socket, which frees its place in the admission when it is closed.

    Attributes:
        connection: its place in the admission.
        peer: the peer's host; empty for a Unix socket.
    """

    connection: Connection
    peer: str

    def close(self) -> None:
        """Close the socket and free its place."""
        super().close()
        self.connection.release()

    def cut(self) -> None:
        """End the connection at once, from any thread, also while other threads read from it or write to it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class GuardedListener(socket.socket):
    """A listening socket that accepts only what `Admission` permits, and on Unix sockets only its own user.

    Ownership: takes the file descriptor of the bound socket. `accept` never blocks.

    Args:
        bound: a bound stream socket, or a Unix socket of packets.
        admission: the limits, and the connections counted so far.
        refusal: bytes sent to a refused connection before it is closed.
    """

    def __init__(self, bound: socket.socket, admission: Admission, *, refusal: bytes = b"") -> None:
        family, kind, proto = bound.family, bound.type, bound.proto
        super().__init__(family, kind, proto, fileno=bound.detach())
        self.setblocking(False)
        self.admission = admission
        self._refusal = refusal
        self._by_descriptor: WeakValueDictionary[int, Connection] = WeakValueDictionary()
        # Closed to accept, and drop, one connection when no descriptor is left: it would stay in the backlog and wake
        # the loop again and again.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[AdmittedSocket, Any]:
        """Accept the next connection that the admission permits.

        Raises:
            BlockingIOError: no connection waits. OSError: the listener is closed.
        """
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
            # Another user at a Unix socket gets no answer: it would say that something listens here.
            if self._refusal and (sock.family != socket.AF_UNIX or is_same_user(sock)):
                with contextlib.suppress(OSError):
                    # The answer fits an empty send buffer; nothing here may wait for the peer.
                    sock.setblocking(False)
                    sock.send(self._refusal)
            # Not AdmittedSocket.close: there is no place to free.
            socket.socket.close(sock)
        raise BlockingIOError(errno.EAGAIN, f"{_REFUSED_A_TURN} connections were refused in this turn")

    def _admit(self, sock: AdmittedSocket, address: Any) -> Connection | None:
        if sock.family == socket.AF_UNIX:
            if not is_same_user(sock):
                self.admission.report(
                    f"a connection of user {peer_uid(sock)} was refused: not the owner of this socket"
                )
                return None
            sock.peer = ""
        else:
            sock.peer = str(address[0])
            # An answer of two writes, its head and its body, would wait 40 ms for a delayed ACK. asyncio sets this only
            # where the socket names its protocol, which a listener of ours does not.
            with contextlib.suppress(OSError):
                # Refused by some systems if the peer has gone already, which is no fault of the listener.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self.admission.admit(sock.peer or "unix", sock.cut)
        if connection is not None:
            sock.connection = connection
            # At a Unix socket the kernel has authenticated the peer: it is this user.
            if sock.family == socket.AF_UNIX and not connection.prove("unix"):
                connection.release()
                return None
        return connection

    def _drop_one(self) -> None:
        self._close_spare()
        with contextlib.suppress(OSError):
            descriptor, _ = self._accept()  # type: ignore[attr-defined]
            os.close(descriptor)
        # Another thread may take the descriptor first; the next shortage then has no spare one, and only gets it back.
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def connection_of(self, descriptor: int) -> Connection:
        """Return the admission's record of an open, accepted socket, by its file descriptor."""
        return self._by_descriptor[descriptor]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self.fileno() >= 0:
            super().close()
            self._close_spare()


Serve = Callable[[socket.socket, Connection, str], None]
"""Serves one connection until it ends: the socket (over TLS if there is a context), its admission, the peer's host."""


class ThreadedListener:
    """A server that runs each connection in its own thread. Started by the constructor.

    Args:
        bound: a bound socket; owned by this object from now on.
        admission: the limits, and the connections counted so far.
        serve: called in the connection's thread; the socket is closed when it returns. An OSError that it raises ends
            that connection only.
        name: name of the threads.
        tls: TLS context of the server side; None: plain TCP.
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
        self._listener.listen(BACKLOG)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except PenstockError:
            self._listener.close()
            raise

    def _run(self) -> None:
        try:
            self._accept_until_closed()
        finally:
            self._listener.close()

    def _accept_until_closed(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while self._is_open:
            poll.poll(SWEEP_S * 1000 if self.admission.num_open else None)
            self.admission.sweep()
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                if not self._is_open:
                    return
                # A connection that ended before it was accepted, or a kernel short of memory. In the second case the
                # listener stays readable, and without the pause this loop would spin.
                time.sleep(0.05)
                continue
            self._start(sock)

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
                # Wrapped before the handshake, so that the deadline finds the socket that has the descriptor.
                served = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection.cut = lambda: cut(served)
                served.do_handshake()
            self._serve(served, connection, peer)
        except PenstockError:
            # A fault of the handler, not of the connection, though some of these classes are an OSError, too.
            raise
        except OSError:
            # The connection broke, or was cut: the peer knows.
            return
        finally:
            served.close()
            connection.release()

    def close(self) -> None:
        """Stop accepting; open connections continue. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(OSError):
            # Wakes the thread, also where a forked child has a copy of the socket.
            self._listener.shutdown(socket.SHUT_RDWR)
        # The thread closes the socket: closed here, its number could name another file before the thread's `poll` looks
        # at it again, and the thread would wait for that file without end.
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def forget(self) -> None:
        """In a forked child: close the copy of the listening socket, without shutting down the parent's."""
        self._is_open = False
        self.admission.forget()
        self._listener.close()


def cut(sock: socket.socket) -> None:
    """End a connection at once, from any thread, also while other threads send or receive on it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket.shutdown: it drops the TLS state, and a receiver in another thread would return ciphertext.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


ACCEPTS_A_TURN = 10
"""Connections that are accepted before those that are open are served."""
PAUSE_S = 0.01
"""Pause after a full turn: at most 1,000 connections a second. The kernel queues others, up to `listener.BACKLOG`."""


class Acceptor:
    """An accept loop of asyncio for one listener, at a bounded rate. Call `start` and `close` in the loop's thread.

    `loop.create_server` accepts whenever the listener is readable. Under a flood of new connections each turn of the
    loop then begins with dozens of them, and a request on an open connection waits for all of them.

    Args:
        listener: a socket that listens already; its owner closes it.
        make_protocol: called for each connection.
        context: TLS context of the server side; None: plain TCP.
    """

    def __init__(
        self, listener: GuardedListener, make_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        # The loop itself has only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True

    def start(self) -> None:
        """Start or resume accepting."""
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting; open connections continue. Idempotent."""
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
                # The kernel is short of memory, or the listener is closed: try again after the pause.
                break
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_S, self.start)

    async def _connect(self, sock: socket.socket) -> None:
        # A failed TLS handshake is not an error here: only that peer is affected, and it sees the failure itself.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make_protocol, sock, ssl=self._context)
