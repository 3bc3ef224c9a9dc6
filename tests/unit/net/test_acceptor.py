"""The acceptor of an asyncio loop accepts a flood of connections in small parts."""

from __future__ import annotations

import asyncio
import socket

from penstock.net.admission import Admission, ConnectionLimits
from penstock.net.listener import ACCEPTS_A_TURN, Acceptor, GuardedListener

NUM_CONNECTIONS = 3 * ACCEPTS_A_TURN + 5


class Echo(asyncio.Protocol):
    """A protocol that echoes received bytes."""

    num_made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Echo.num_made += 1
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def listening() -> GuardedListener:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(1024)
    limits = ConnectionLimits(total=1024, unproven=512, unproven_per_address=512)
    return GuardedListener(bound, Admission(limits, name="test"))


def test_connection_flood_is_accepted_in_batches() -> None:
    async def run() -> None:
        Echo.num_made = 0
        listener = listening()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(NUM_CONNECTIONS)]
        acceptor = Acceptor(listener, Echo, None)
        acceptor.start()
        seen = []
        async with asyncio.timeout(10):
            while Echo.num_made < NUM_CONNECTIONS:
                seen.append(Echo.num_made)
                await asyncio.sleep(0)
        parts = [later - earlier for earlier, later in zip(seen, [*seen[1:], NUM_CONNECTIONS], strict=True)]
        assert max(parts) <= ACCEPTS_A_TURN
        for client in clients:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, b"?")
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b"?"
            client.close()
        acceptor.close()
        listener.close()

    asyncio.run(run())


def test_closed_acceptor_accepts_no_connection() -> None:
    async def run() -> None:
        Echo.num_made = 0
        listener = listening()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(NUM_CONNECTIONS)]
        acceptor = Acceptor(listener, Echo, None)
        acceptor.start()
        async with asyncio.timeout(10):
            while not Echo.num_made:
                await asyncio.sleep(0)
        acceptor.close()
        await asyncio.sleep(0.1)
        assert Echo.num_made == ACCEPTS_A_TURN, "the pause after the first part ended with nothing to go on with"
        for client in clients:
            client.close()
        listener.close()

    asyncio.run(run())
