"""Transports that cross hosts beside a plain socket, curl and scp: two network namespaces on one shaped link.

    python -m benchmarks.bench_hosts [--cases socket,http,nixl,curl,scp] [--data random|weights] [--gbit 10] [--mb 2000]
        [--reps 7] [--json]

Needs root, iproute2 (`ip`, `tc` with tbf); curl and nginx, scp and sshd where those cases are asked for.

Two namespaces joined by a veth pair, both ends shaped by tbf. A holder in one has the bytes in memory (curl, scp: in a
file on tmpfs), a reader in the other fetches them into memory touched before (curl: /dev/null; scp: tmpfs). A case is a
pair of processes that live through the run; the order is drawn anew in each repetition, after one that warms up. The
limit is the plain socket: one connection, `sendall` from memory, `recv_into` (MSG_WAITALL, 4 MiB) in place. "Paired" is
the median of each rate over the plain socket's of the same repetition. All bytes are compared after the last one.
`http` compresses where it measures that to be faster, `http_raw` never, `http_zstd` always. Weights are BF16: normal,
the standard deviation of each row of 4,096 is 0.02 times a log-normal of 0.35.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from penstock.segments import Segments
from penstock.transport.protocol import Memory, Transport, decode, encode

CASES = ("socket", "http", "nixl", "curl", "scp")
COMPRESS = {"http": None, "http_raw": False, "http_zstd": True}
HOLDER, READER = "10.213.7.1", "10.213.7.2"
NAMES = (f"penstock-{os.getpid()}-a", f"penstock-{os.getpid()}-b")
SEGMENT_BYTES = 16 << 20
"""Segments of one read, as `fleet` asks for them."""
READ_SEGMENTS = 8
"""Segments of one `post_read`; two are under way at once, as in a fetch."""


def sample(nbytes: int, data: str) -> np.ndarray:
    chance = np.random.default_rng(7)
    if data == "random":
        return np.resize(chance.integers(0, 256, 64 << 20, np.uint8), nbytes)
    values = chance.standard_normal((8192, 4096), np.float32)
    values *= np.exp(chance.normal(np.log(0.02), 0.35, (8192, 1))).astype(np.float32)
    return np.resize(values.view(np.uint16).reshape(-1)[1::2].copy().view(np.uint8), nbytes)


def open_transport(case: str, listen: str, tls: str) -> Transport:
    if case in COMPRESS:
        from penstock.transport.http import HttpTransport

        return HttpTransport.open(f"{listen}:0", compress=COMPRESS[case])
    from penstock_nixl.transport import NixlTransport

    return NixlTransport.open(tls=tls)


def cpu_s() -> float:
    used = os.times()
    return used.user + used.system


def hold(case: str, nbytes: int, tls: str, data: str) -> None:
    """The holder: says how it is reached, and its CPU seconds whenever asked, until stdin ends."""
    memory = sample(nbytes, data)
    if case == "socket":
        listener = socket.create_server((HOLDER, 0))
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        connection, _ = listener.accept()
        while connection.recv(1):
            connection.sendall(memory)
        return
    transport = open_transport(case, HOLDER, tls)
    handle = transport.register(Memory.of_buffer(memoryview(memory)))
    print(json.dumps({"descriptor": encode(handle.descriptor).hex()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"cpu_s": cpu_s()}), flush=True)
    transport.close()


def socket_reader(port: int, into: np.ndarray) -> Callable[[], None]:
    connection = socket.create_connection((HOLDER, port))

    def read() -> None:
        connection.sendall(b"g")
        view, at = memoryview(into), 0
        while at < len(view):
            at += connection.recv_into(view[at : at + (4 << 20)], 0, socket.MSG_WAITALL)

    return read


def transport_reader(transport: Transport, descriptor: str, into: np.ndarray) -> Callable[[], None]:
    source, mine = decode(bytes.fromhex(descriptor)), transport.register(Memory.of_buffer(memoryview(into)))
    at = np.arange(0, len(into), SEGMENT_BYTES)
    length = np.minimum(len(into) - at, SEGMENT_BYTES)
    groups = range(0, len(at), READ_SEGMENTS)
    rows = [slice(first, first + READ_SEGMENTS) for first in groups]

    def read() -> None:
        posted: list[Any] = []
        for row in rows:
            segments = Segments(src=at[row], dst=at[row], nbytes=length[row])
            posted.append(transport.post_read(mine, source, segments))
            if len(posted) == 2:
                transport.wait(posted.pop(0), stall_s=30)
        for pending in posted:
            transport.wait(pending, stall_s=30)

    return read


def read(case: str, nbytes: int, tls: str, where: str, data: str) -> None:
    """The reader: one line of stdin is one read, answered by its seconds; "compare" compares, and says how it read."""
    into, given = np.full(nbytes, 0xAA, np.uint8), json.loads(where)
    if case == "socket":
        fetch = socket_reader(given["port"], into)
    else:
        transport = open_transport(case, READER, tls)
        fetch = transport_reader(transport, given["descriptor"], into)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "compare":
            way = transport.way(decode(bytes.fromhex(given["descriptor"]))) if case in COMPRESS else (case, "")
            print(json.dumps({"same": bool((into == sample(nbytes, data)).all()), "way": ": ".join(way)}), flush=True)
            continue
        into[:: 1 << 16] = 0xAA
        cpu, began = cpu_s(), time.perf_counter()
        fetch()
        print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": cpu_s() - cpu}), flush=True)
    os._exit(0)


# The driver.


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def link(gbit: float) -> Iterator[None]:
    """Two namespaces on a link of this speed."""
    try:
        for name in NAMES:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", "pv0", "netns", NAMES[0], "type", "veth", "peer", "name", "pv0", "netns", NAMES[1])
        for name, address in zip(NAMES, (HOLDER, READER), strict=True):
            inside = ("ip", "-n", name)
            command(*inside, "address", "add", f"{address}/24", "dev", "pv0")
            command(*inside, "link", "set", "pv0", "up")
            command(*inside, "link", "set", "lo", "up")
            if gbit:
                rate = ("rate", f"{gbit}gbit", "burst", "4mb", "latency", "20ms")
                command("tc", "-n", name, "qdisc", "add", "dev", "pv0", "root", "tbf", *rate)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


class Talk:
    """A process that answers each line by a line of JSON."""

    def __init__(self, namespace: str, words: list[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.process = subprocess.Popen([*inside, *words], **pipes)

    def answer(self) -> dict[str, Any]:
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.process.args} ended with {self.process.wait(10)}")

    def ask(self, text: str = "") -> dict[str, Any]:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()


Turn = Callable[[], dict[str, float]]


@contextlib.contextmanager
def python_pair(case: str, nbytes: int, tls: str, data: str) -> Iterator[tuple[Turn, Callable[[], str]]]:
    words = [sys.executable, "-m", "benchmarks.bench_hosts", "--mb", str(nbytes / 1e6), "--tls", tls, "--data", data]
    holder = Talk(NAMES[0], [*words, "--hold", case])
    try:
        reader = Talk(NAMES[1], [*words, "--read", case, "--where", json.dumps(holder.answer())])
        reader.answer()

        def turn() -> dict[str, float]:
            if case == "socket":
                return reader.ask()
            before = holder.ask()["cpu_s"]
            found = reader.ask()
            return found | {"holder_cpu_s": holder.ask()["cpu_s"] - before}

        def compare() -> str:
            found = reader.ask("compare")
            return found["way"] if found["same"] else ""

        yield turn, compare
        reader.close()
    finally:
        holder.close()


def timed(*words: str) -> dict[str, float]:
    before, began = os.times(), time.perf_counter()
    subprocess.run(["ip", "netns", "exec", NAMES[1], *words], check=True, timeout=300, stdout=subprocess.DEVNULL)
    after, seconds = os.times(), time.perf_counter() - began
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_s": cpu}


@contextlib.contextmanager
def served_file(case: str, nbytes: int, folder: Path, data: str) -> Iterator[tuple[Turn, Callable[[], str]]]:
    """curl from nginx, to /dev/null, or scp from sshd, of a file on tmpfs."""
    file = folder / "weights"
    if not file.exists():
        file.write_bytes(memoryview(sample(nbytes, data)))
    if case == "curl":
        conf = folder / "nginx.conf"
        conf.write_text(
            f"daemon off; pid {folder}/pid; error_log stderr; events {{}} worker_processes 1; user root;\n"
            f"http {{ access_log off; sendfile on; server {{ listen {HOLDER}:8080; root {folder}; }} }}\n"
        )
        server = ["nginx", "-c", str(conf)]
        words = ["curl", "-s", "-f", "-o", "/dev/null", f"http://{HOLDER}:8080/weights"]
    else:
        for name in ("host", "user"):
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = ["-D", "-e", "-f", "/dev/null", "-h", str(folder / "host"), "-o", f"ListenAddress={HOLDER}:8022"]
        sshd += ["-o", f"AuthorizedKeysFile={folder / 'user.pub'}", "-o", "StrictModes=no", "-o", "PidFile=none"]
        server = [shutil.which("sshd") or "/usr/sbin/sshd", *sshd, "-o", "Subsystem=sftp internal-sftp"]
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        words = ["scp", "-q", "-P", "8022", "-i", str(folder / "user"), *(f"-o{one}" for one in options)]
        words += [f"root@{HOLDER}:{file}", str(folder / "copied")]
    process = subprocess.Popen(["ip", "netns", "exec", NAMES[0], *server], stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield lambda: timed(*words), lambda: case
    finally:
        process.terminate()
        process.wait(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: str
    gb_per_s: float
    low: float
    high: float
    paired: float
    reader_cpu_s: float
    holder_cpu_s: float | None
    way: str
    """How it said it read, by the end."""


def bench(cases: list[str], nbytes: int, reps: int, gbit: float, tls: str, data: str) -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        stack.enter_context(link(gbit))
        turns, compare = {}, {}
        for case in cases:
            is_file = case in {"curl", "scp"}
            opened = served_file(case, nbytes, folder, data) if is_file else python_pair(case, nbytes, tls, data)
            turns[case], compare[case] = stack.enter_context(opened)
        for rep in range(reps + 1):
            for case in random.Random(rep).sample(cases, len(cases)):
                one = turns[case]()
                if rep:
                    found[case].append(one)
        ways = {case: compare[case]() for case in cases}
    wrong = [case for case, way in ways.items() if not way]
    if wrong:
        raise SystemExit(f"other bytes than were sent: {wrong}")
    limits = [nbytes / one["seconds"] for one in found["socket"]] if "socket" in found else []
    return [row(case, nbytes, found[case], limits, ways[case]) for case in cases]


def row(case: str, nbytes: int, turns: list[dict[str, float]], limits: list[float], way: str) -> Row:
    rates = [nbytes / one["seconds"] for one in turns]
    holder = [one["holder_cpu_s"] for one in turns if "holder_cpu_s" in one]
    return Row(
        case=case,
        gb_per_s=statistics.median(rates) / 1e9,
        low=min(rates) / 1e9,
        high=max(rates) / 1e9,
        paired=statistics.median(a / b for a, b in zip(rates, limits, strict=True)) if limits else 0.0,
        reader_cpu_s=statistics.median(one["cpu_s"] for one in turns),
        holder_cpu_s=statistics.median(holder) if holder else None,
        way=way,
    )


def versions() -> str:
    words = [f"Python {platform.python_version()}", f"Linux {platform.release().split('-')[0]}"]
    for package in ("penstock", "nixl", "numpy", "zstandard"):
        with contextlib.suppress(PackageNotFoundError):
            words.append(f"{package} {version(package)}")
    for program in (["curl", "--version"], ["nginx", "-v"], ["ssh", "-V"]):
        if shutil.which(program[0]):
            done = subprocess.run(program, capture_output=True, text=True, timeout=10)
            words.append((done.stdout or done.stderr).splitlines()[0].split(" (")[0].split(",")[0])
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--data", choices=("random", "weights"), default="random")
    parser.add_argument("--gbit", type=float, default=10.0, help="0: no shaping")
    parser.add_argument("--mb", type=float, default=2000.0)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--tls", default="tcp", help="UCX's transports, for nixl")
    parser.add_argument("--json", action="store_true")
    for inner in ("--hold", "--read", "--where"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    nbytes = int(asked.mb * 1e6)
    if asked.hold:
        hold(asked.hold, nbytes, asked.tls, asked.data)
        return
    if asked.read:
        read(asked.read, nbytes, asked.tls, asked.where, asked.data)
        return
    rows = bench(asked.cases.split(","), nbytes, asked.reps, asked.gbit, asked.tls, asked.data)
    if asked.json:
        print(json.dumps([asdict(one) for one in rows]))
        return
    print(f"{versions()}; load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| case | GB/s median | min-max | of the link | of the socket, paired | reader CPU s | holder CPU s | read by |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in rows:
        link_share = f"{one.gb_per_s / asked.gbit * 8:.2f}" if asked.gbit else "-"
        holder = f"{one.holder_cpu_s:.2f}" if one.holder_cpu_s is not None else "-"
        rates = f"{one.gb_per_s:.3f} | {one.low:.3f}-{one.high:.3f} | {link_share} | {one.paired:.2f}"
        print(f"| {one.case} | {rates} | {one.reader_cpu_s:.2f} | {holder} | {one.way} |")


if __name__ == "__main__":
    main()
