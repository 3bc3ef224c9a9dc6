"""Connections that are held against a hub by callers without a token: idle, slow, malformed, endless.

    python -m benchmarks.hub_attackers HOST PORT --count 10000 --sources 127.0.1.1:40

One asyncio process. Each of the connections comes again `--pause-s` after it was cut. Runs until stdin is closed, then
prints one line of JSON: connections made and cut, how many were open at the median moment, the fewest and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import itertools
import json
import resource
import sys
from collections import Counter

KINDS = ("idle", "half head", "slow head", "endless line", "many headers", "malformed", "slow body", "wrong token")
DRIP_S = 2.0


class Attackers:
    """All connections of this process."""

    def __init__(self, address: tuple[str, int], sources: list[str], pause_s: float) -> None:
        self._address, self._sources, self._pause_s = address, itertools.cycle(sources), pause_s
        self.counts: Counter[str] = Counter()
        self.num_open, self.samples = 0, list[int]()

    async def attack(self, kind: str, delay_s: float) -> None:
        """Hold one connection for ever, made anew whenever it is cut."""
        source = next(self._sources)
        await asyncio.sleep(delay_s)
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self._address, local_addr=(source, 0))
            except OSError:
                self.counts["refused"] += 1
                await asyncio.sleep(self._pause_s)
                continue
            self.counts["made"] += 1
            self.num_open += 1
            try:
                await asyncio.gather(self._send(kind, writer), self._until_cut(reader, writer))
            except OSError:
                self.counts["cut"] += 1
            self.num_open -= 1
            writer.transport.abort()
            await asyncio.sleep(self._pause_s)

    async def _until_cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            continue
        writer.transport.abort()
        raise ConnectionAbortedError("cut")

    async def _send(self, kind: str, writer: asyncio.StreamWriter) -> None:
        head = b"POST /v1/hello HTTP/1.1\r\nhost: hub\r\n"
        if kind == "half head":
            writer.write(head)
        elif kind == "slow head":
            writer.write(head + b"x: ")
            await self._drip(writer)
        elif kind == "endless line":
            writer.write(b"GET /" + b"a" * (64 << 10))
        elif kind == "many headers":
            writer.write(head + b"x: y\r\n" * 8192)
        elif kind == "malformed":
            writer.write(b"\x00\xff" * 64)
        elif kind == "slow body":
            writer.write(head + b"content-length: 1000000\r\n\r\n")
            await self._drip(writer)
        elif kind == "wrong token":
            writer.write(head + b"authorization: Bearer 0123456789abcdef0123\r\ncontent-length: 0\r\n\r\n")

    async def _drip(self, writer: asyncio.StreamWriter) -> None:
        while not writer.transport.is_closing():
            await asyncio.sleep(DRIP_S)
            writer.write(b"x")

    async def run(self, count: int, spread_s: float) -> None:
        """Attack until stdin is closed."""
        attackers = [
            asyncio.create_task(self.attack(KINDS[number % len(KINDS)], spread_s * number / count))
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
    parser.add_argument("--pause-s", type=float, default=1.0, help="before a connection that was cut comes again")
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
