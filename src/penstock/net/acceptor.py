"""Accept connections in an asyncio loop at a bounded rate, so that open connections are served first.

In: a `GuardedListener`, a factory of protocols. Out: connections of the loop, as `loop.create_server` makes them.
Not here: the choice of connections to admit (`admission`), the protocol.

`loop.create_server` accepts whenever the listener is readable. Under a flood of new connections each turn of the loop
then begins with dozens of them, and a request on an open connection waits for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from penstock.net.listener import GuardedListener

ACCEPTS_A_TURN = 10
"""Connections that are accepted before those that are open are served."""
PAUSE_S = 0.01
"""Pause after a full turn: at most 1,000 connections a second. The kernel queues others, up to `listener.BACKLOG`."""


class Acceptor:
    """An accept loop for one listener. Call `start` and `close` in the loop's thread.

    Args:
        listener: a socket that listens already; its owner closes it.
        make_protocol: called for each connection.
        context: TLS context of the server side; None: plain TCP.
    """

    def __init__(
        self, listener: GuardedListener, make_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        self._listener, self._make_protocol, self._context = listener, make_protocol, context
        self._loop = asyncio.get_running_loop()
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
