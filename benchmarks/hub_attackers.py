"""Connections that are held against a hub by callers without a token: idle, slow, malformed, endless.

    python -m benchmarks.hub_attackers HOST PORT --count 10000 --sources 127.0.1.1:40

One asyncio process. Each of the connections comes again about `--pause-s` after it was cut. Runs until stdin is closed,
then prints one line of JSON: connections made and cut, and how many were open: at the median moment, least, most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import itertools
import json
import random
import resource
import socket
import sys
from collections import Counter

HEAD = b"POST /v1/hello HTTP/1.1\r\nhost: hub\r\n"
DRIP_S = 2.0
FIRST_BYTES = {
    "idle": b"",
    "half head": HEAD,
    "slow head": HEAD + b"x: ",
    "endless line": b"GET /" + b"a" * (64 << 10),
    "many headers": HEAD + b"x: y\r\n" * 8192,
    "malformed": b"\x00\xff" * 64,
    "slow body": HEAD + b"content-length: 1000000\r\n\r\n",
    "wrong token": HEAD + b"authorization: Bearer 0123456789abcdef0123\r\ncontent-length: 0\r\n\r\n",
}
"""What each kind of connection sends when it is made. `slow` ones add a byte every `DRIP_S`."""


class Attack(asyncio.Protocol):
    """An attacking connection, from its connect to its end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.write(FIRST_BYTES[self._kind])
        if self._kind.startswith("slow"):
            asyncio.get_running_loop().call_later(DRIP_S, self._drip)

    def _drip(self) -> None:
        if not self.ended.done():
            self._transport.write(b"x")
            asyncio.get_running_loop().call_later(DRIP_S, self._drip)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Attackers:
    """All connections of this process."""

    def __init__(self, address: tuple[str, int], sources: list[str], pause_s: float) -> None:
        self._address, self._sources, self._pause_s = address, itertools.cycle(sources), pause_s
        self.counts: Counter[str] = Counter()
        self.num_open, self.samples = 0, list[int]()

    async def attack(self, kind: str, delay_s: float) -> None:
        """Hold one connection for ever, made anew whenever it is cut."""
        loop = asyncio.get_running_loop()
        source = next(self._sources)
        await asyncio.sleep(delay_s)
        while True:
            sock = socket.socket()
            sock.setblocking(False)
            try:
                sock.bind((source, 0))
                await loop.sock_connect(sock, self._address)
            except OSError:
                sock.close()
                self.counts["refused"] += 1
            else:
                self.counts["made"] += 1
                self.num_open += 1
                _, connection = await loop.create_connection(lambda: Attack(kind), sock=sock)
                await connection.ended
                self.num_open -= 1
                self.counts["cut"] += 1
            # Not all in step: attackers do not wait for each other.
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))

    async def run(self, count: int, spread_s: float) -> None:
        """Attack until stdin is closed."""
        kinds = tuple(FIRST_BYTES)
        attackers = [
            asyncio.create_task(self.attack(kinds[number % len(kinds)], spread_s * number / count))
            for number in range(count)
        ]
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        print("ready", flush=True)
        while not ended.done():
            await asyncio.sleep(0.25)
            self.samples.append(self.num_open)
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


def sources_of(text: str) -> list[str]:
    """`127.0.1.1:40` as forty addresses from the first one on."""
    first, _, count = text.partition(":")
    start = int(ipaddress.IPv4Address(first))
    return [str(ipaddress.IPv4Address(start + number)) for number in range(int(count or 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--sources", default="127.0.1.1:40", help="first address, and how many in a row")
    parser.add_argument("--pause-s", type=float, default=10.0, help="before a connection that was cut comes again")
    parser.add_argument("--spread-s", type=float, default=5.0, help="the first ones come within this")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attackers = Attackers((args.host, args.port), sources_of(args.sources), args.pause_s)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(attackers.run(args.count, args.spread_s))
    later = sorted(attackers.samples[len(attackers.samples) // 3 :] or [0])
    held = {"held_median": later[len(later) // 2], "held_least": later[0], "held_most": later[-1]}
    print(json.dumps(dict(attackers.counts) | held))


if __name__ == "__main__":
    main()
