"""A fleet on one hub process: members that beat, and members that fetch at once; how soon each question is answered.

    python -m benchmarks.bench_hub                       1,000 members, 20 s of each phase
    python -m benchmarks.bench_hub --redis unix:///path  the hub's state in Redis
    python -m benchmarks.bench_hub --attackers 10000     only `beats`, while so many connections are held against it

Phases: `beats`, every member holds a whole model and beats when the hub asks it to; `cold start`, all come within
`--spread-s` with nothing, read storage by claims, ask for upstreams and fill, as `fetch.run` does; `one instant`, the
same, but all ask their first question in the same instant; `full`, 32 that ask without a pause. The members are
one asyncio process beside the hub, so its own time is in the latencies, but for garbage collection, which is off in it:
a collection among 1,000 members took up to 37 ms. `cores` is what the hub itself used.

With `--attackers`, `beats` runs three times: with nobody else, with attackers at 40 other addresses of loopback, and
with attackers at the members' own address, as behind one NAT; `hub_attackers` says what they send. The members come
when the attack is under way: to join is part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import UnknownMember
from penstock.hub.auth import LIFE_HEADER, member_of
from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Hello,
    HoldingState,
    Identity,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
)
from penstock.types import MIB

IDENTITY = Identity(model="llama-70b", revision="w1-0", dtype="BF16")
CHUNK_BYTES = 16 * MIB
PER_HOST = 8
JOIN_AT_ONCE = 50


class Asker:
    """The connection of a member."""

    def __init__(self, host: str, port: int, taken: dict[str, list[float]], token: str) -> None:
        self._host, self._port, self._taken, self.life = host, port, taken, secrets.token_hex(16)
        self._token, self.num_again = token, 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, name: str, method: str, path: str, body: object, gives: type | None = None):
        content = msgspec.json.encode(body)
        head = f"{method} {path} HTTP/1.1\r\nhost: hub\r\n{LIFE_HEADER}: {self.life}\r\n"
        head += f"authorization: Bearer {self._token}\r\ncontent-length: {len(content)}\r\n\r\n"
        start = time.perf_counter()
        while True:
            try:
                answer, got = await asyncio.wait_for(self._exchange(head.encode() + content), 30)
                break
            except (OSError, asyncio.IncompleteReadError):
                # As `hub.client` does: a connection that was refused or has ended is made anew, within 10 s.
                self.close()
                self.num_again += 1
                if time.perf_counter() - start > 10:
                    raise
                await asyncio.sleep(0.1)
        self._taken[name].append(time.perf_counter() - start)
        if answer.startswith(b"HTTP/1.1 410"):
            raise UnknownMember(f"{name}: {got[:200]!r}")
        if not answer.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{name}: {answer[:40]!r} {got[:200]!r}")
        return None if gives is None else msgspec.json.decode(got, type=gives)

    async def _exchange(self, request: bytes) -> tuple[bytes, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in answer.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        return answer, await reader.readexactly(length)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Member:
    """Acts as a fetching member does, without bytes: chunks come at a rate."""

    def __init__(self, number: int, asker: Asker, num_chunks: int) -> None:
        self.id = member_of(asker.life)
        self.hello = Hello(member=self.id, host=f"host-{number // PER_HOST}", doors=(f"http://10.0.0.1:{number + 1}",))
        self.asker, self.num_chunks = asker, num_chunks
        self.have, self.parent = 0, ""
        self.claims: tuple[tuple[int, int], ...] = ()
        self.read: list[tuple[int, int]] = []
        self.welcome: Welcome

    def state(self) -> HoldingState:
        # What was read from storage, and a growing part of what others have.
        have = np.zeros(self.num_chunks, np.bool_)
        have[: self.have] = True
        for start, stop in self.read:
            have[start:stop] = True
        edges = np.flatnonzero(np.diff(np.concatenate(([0], have.view(np.int8), [0]))))
        ranges = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        return HoldingState(
            key=IDENTITY.key(),
            identity=IDENTITY,
            num_chunks=self.num_chunks,
            nbytes=self.num_chunks * CHUNK_BYTES,
            have=ranges,
            claims=self.claims,
            state="whole" if have.all() else "filling",
            max_readers=8,
            parent=self.parent,
        )

    async def join(self) -> None:
        self.welcome = await self.asker.ask("hello", "POST", "/v1/hello", self.hello, Welcome)

    async def beat(self) -> None:
        try:
            await self.asker.ask("beat", "PUT", f"/v1/members/{self.id}", Beat(holdings=(self.state(),)))
        except UnknownMember:
            # It was silent for too long while others were still joining; a real member says hello again, too.
            self.asker.num_again += 1
            await self.join()

    async def beats(self, until: float) -> None:
        while time.monotonic() < until:
            await self.beat()
            await asyncio.sleep(self.welcome.beat_s)

    async def fill(self, until: float, fill_s: float, wait_s: float) -> None:
        """Requests and beats, each when it is time, the first request with a claim; whole after `fill_s`."""
        await asyncio.sleep(wait_s)
        started = time.monotonic()
        # The first request stands for a beat.
        next_beat = started + self.welcome.beat_s
        next_flight, next_claim = 0.0, math.inf
        while (now := time.monotonic()) < until:
            self.have = min(self.num_chunks, int(self.num_chunks * (now - started) / fill_s))
            filling = self.have < self.num_chunks
            if now >= next_beat:
                await self.beat()
                next_beat = now + self.welcome.beat_s
            claim = None
            if filling and now >= next_flight:
                is_first = not next_flight
                asked = UpstreamsRequest(member=self.id, holding=self.state(), can_read_storage=True, claim=is_first)
                flight = await self.asker.ask("flight", "POST", "/v1/flight", asked, UpstreamsReply)
                next_flight, claim = now + flight.ask_again_s, flight.claim
                self.parent = flight.upstreams[0].member if flight.upstreams else ""
            if filling and now >= next_claim:
                self.read += self.claims
                self.claims = ()
                asked = ClaimRequest(member=self.id, holding=self.state())
                claim = await self.asker.ask("claim", "POST", "/v1/claim", asked, ClaimReply)
            if claim is not None:
                self.claims = claim.ranges
                # A piece of 64 MiB at 10 Gb/s, or as long as the hub says.
                next_claim = now + (0.05 * len(claim.ranges) or claim.ask_again_s)
            due = min(next_beat, next_flight, next_claim) if filling else next_beat
            await asyncio.sleep(max(0.005, due - time.monotonic()))


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(phase: str, taken: dict[str, list[float]], seconds: float, cores: float) -> list[dict[str, object]]:
    """Per question, and of all."""
    rows = []
    everything = [took for times in taken.values() for took in times]
    for name, times in [*sorted(taken.items()), ("all", everything)]:
        p50, p99 = np.percentile(times, [50, 99]) * 1000
        rows.append(
            {
                "phase": phase,
                "question": name,
                "count": len(times),
                "per_s": round(len(times) / seconds, 1),
                "p50_ms": round(float(p50), 2),
                "p99_ms": round(float(p99), 2),
                "max_ms": round(max(times) * 1000, 1),
                "cores": round(cores, 2) if name == "all" else "",
            }
        )
    return rows


@contextlib.contextmanager
def attack(address: tuple[str, int], args: argparse.Namespace, sources: str, told: dict[str, object]) -> Iterator[None]:
    """Connections held against the hub by a process of their own while the block runs; then what became of them."""
    command = [sys.executable, "-m", "benchmarks.hub_attackers", address[0], str(address[1])]
    command += ["--count", str(args.attackers), "--sources", sources, "--pause-s", str(args.pause_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(8.0)  # longer than they take to come: the members join under attack
        yield
    finally:
        process.stdin.close()
        line = process.stdout.readline()
        process.wait(60)
        process.stdout.close()
    told.update(json.loads(line))


def memory_mb(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1_000_000


async def phase(
    name: str, address: tuple[str, int], pid: int, args: argparse.Namespace, token: str
) -> list[dict[str, object]]:
    """Run one phase with members of its own."""
    gc.collect()
    gc.disable()
    taken: dict[str, list[float]] = defaultdict(list)
    members = [Member(i, Asker(*address, taken, token), args.chunks) for i in range(args.members)]
    for start in range(0, len(members), JOIN_AT_ONCE):
        await asyncio.gather(*(member.join() for member in members[start : start + JOIN_AT_ONCE]))
    joined = dict(taken)
    taken.clear()
    start, used = time.monotonic(), cpu_s(pid)
    until = start + args.seconds
    if name in {"cold start", "one instant"}:
        spread_s = args.spread_s if name == "cold start" else 0.0
        waits = [spread_s * i / len(members) for i in range(len(members))]
        fills = (member.fill(until, 0.8 * args.seconds, wait) for member, wait in zip(members, waits, strict=True))
        await asyncio.gather(*fills)
    else:
        for member in members:
            member.have = args.chunks
        if name == "beats":

            async def later(number: int, member: Member) -> None:
                await asyncio.sleep(member.welcome.beat_s * number / len(members))
                await member.beats(until)

            await asyncio.gather(*(later(i, member) for i, member in enumerate(members)))
        else:

            async def on(member: Member) -> None:
                while time.monotonic() < until:
                    await member.beat()

            await asyncio.gather(*(on(member) for member in members[:32]))
    seconds = time.monotonic() - start
    rows = row(name, taken, seconds, (cpu_s(pid) - used) / seconds)
    rows[-1] |= {"again": sum(member.asker.num_again for member in members), "hub_mb": memory_mb(pid)}
    taken.clear()
    taken.update(joined)
    for member in members:
        await member.asker.ask("leave", "DELETE", f"/v1/members/{member.id}", {})
        member.asker.close()
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=3600, help="of 16 MiB")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--spread-s", type=float, default=2.0, help="members of `cold start` come within this")
    parser.add_argument("--redis")
    parser.add_argument("--attackers", type=int, default=0, help="connections held against the hub meanwhile")
    parser.add_argument("--pause-s", type=float, default=10.0, help="before an attacker that was cut comes again")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    command = [sys.executable, "-m", "penstock.cli.main", "hub", "--listen", "127.0.0.1:0"]
    command += ["--redis", args.redis] if args.redis else []
    token = secrets.token_hex(16)
    directory = tempfile.TemporaryDirectory(prefix="penstock-bench-")
    (Path(directory.name) / "tokens").write_text(token)
    command += ["--token-file", f"{directory.name}/tokens"]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    rows = []
    try:
        assert hub.stdout is not None
        host, _, port = hub.stdout.readline().strip().removeprefix("http://").rpartition(":")
        address = host, int(port)
        if args.attackers:
            rows += asyncio.run(phase("beats", address, hub.pid, args, token))
            for sources in ("127.0.1.1:40", "127.0.0.1"):
                told: dict[str, object] = {"attack": f"{args.attackers} from {sources}"}
                with attack(address, args, sources, told):
                    attacked = asyncio.run(phase("beats", address, hub.pid, args, token))
                rows += [one | told for one in attacked]
        else:
            for name in ("beats", "cold start", "one instant", "full"):
                rows += asyncio.run(phase(name, address, hub.pid, args, token))
    finally:
        hub.send_signal(signal.SIGTERM)
        hub.wait(20)
        hub.stdout.close()
        directory.cleanup()
    if args.json:
        print(json.dumps(rows))
    else:
        print(
            f"{'phase':<11} {'question':<9} {'count':>7} {'per s':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} cores"
        )
        for one in rows:
            print(
                f"{one['phase']:<11} {one['question']:<9} {one['count']:>7} {one['per_s']:>8} {one['p50_ms']:>8}"
                f" {one['p99_ms']:>8} {one['max_ms']:>8} {one['cores']}"
            )
            if "attack" in one and one["question"] == "all":
                keys = ("attack", "made", "cut", "refused", "held_median", "held_most", "again", "hub_mb")
                print("            " + ", ".join(f"{key} {one.get(key, 0)}" for key in keys))
    return rows


if __name__ == "__main__":
    main()
