"""S3 on loopback -> CPU memory: penstock's source beside a plain client, boto3, obstore and Run:ai Model Streamer.

    python -m benchmarks.bench_objects [--servers nginx,radosgw] [--mib 512] [--reps 7] [--peers PYTHON] [--json]

Every client is a process of its own that lives through the run, reads the whole object into memory touched before
(Run:ai allocates its own, once a call, as it is made to), and waits for its turn; the order is drawn anew in every
repetition. The limit is a plain client: `http.client` and a signed URL, `readinto` into that memory, in as many threads
of 8 MiB ranges, its best thread count; "paired" is the median of the ratios to the plain client's run of the same
repetition and thread count, which a noisy machine moves less. Bytes are compared once per client. CPU is the client's.
PYTHON has boto3 1.4, obstore 0.12, runai-model-streamer[s3] 0.17.0: `python -m venv .venv-bench`, pip install those.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIB = 1 << 20
BUCKET, KEY = "weights", "model.safetensors"
CLIENTS = ("plain", "penstock", "penstock-cached", "boto3", "obstore", "runai")
PEERS = {"boto3", "runai"}


def in_ranges(
    nbytes: int, chunk_bytes: int, num_threads: int, make: Callable[[], Callable[[int, int], object]]
) -> None:
    """Read `[0, nbytes)` in chunks, by threads that take the next one each; `make` gives a thread its reader."""
    offsets, lock, failed = iter(range(0, nbytes, chunk_bytes)), threading.Lock(), []

    def work() -> None:
        try:
            read = make()
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                read(offset, min(offset + chunk_bytes, nbytes))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def client(name: str, job: dict[str, Any], memory: memoryview) -> Callable[[int], bytes | None]:
    """A function of the thread count that reads the object once, into `memory` unless it returns the bytes."""
    endpoint, nbytes, chunk = job["endpoint"], job["nbytes"], job["chunk_bytes"]
    keys = {"access_key_id": job["access_key"], "secret_access_key": job["secret_key"], "region": "us-east-1"}
    if name == "plain":
        from obstore import sign
        from obstore.store import S3Store

        store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True}, **keys)
        url = urlsplit(sign(store, "GET", KEY, timedelta(hours=2)))

        def plain() -> Callable[[int, int], object]:
            connection = http.client.HTTPConnection(url.netloc, timeout=60)

            def read(start: int, stop: int) -> None:
                connection.request("GET", f"{url.path}?{url.query}", headers={"Range": f"bytes={start}-{stop - 1}"})
                reply = connection.getresponse()
                assert reply.status == 206
                while start < stop:
                    got = reply.readinto(memory[start:stop])
                    assert got
                    start += got

            return read

        return lambda threads: in_ranges(nbytes, chunk, threads, plain)
    if name.startswith("penstock"):
        from penstock.config import Settings
        from penstock.storage.cache import open_cached
        from penstock.storage.objects import open_object

        settings = Settings(cache_dir=Path(job["folder"]) / "cache" if name == "penstock-cached" else None)
        options = {"endpoint": endpoint, **keys}

        def penstock(threads: int) -> None:
            source = open_cached(
                open_object(f"s3://{BUCKET}/{KEY}", settings=settings, storage_options=options), settings=settings
            )
            try:
                in_ranges(nbytes, chunk, threads, lambda: lambda start, stop: source.readv(start, [memory[start:stop]]))
            finally:
                source.close()

        return penstock
    if name == "obstore":
        from obstore import get_range
        from obstore.store import S3Store

        store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True}, **keys)

        def ranged(start: int, stop: int) -> None:
            memory[start:stop] = memoryview(get_range(store, KEY, start=start, end=stop))

        return lambda threads: in_ranges(nbytes, chunk, threads, lambda: ranged)
    if name == "boto3":
        import boto3
        from botocore.config import Config

        s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=job["access_key"],
            aws_secret_access_key=job["secret_key"],
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=64),
        )

        def part(start: int, stop: int) -> None:
            body = s3.get_object(Bucket=BUCKET, Key=KEY, Range=f"bytes={start}-{stop - 1}")["Body"]
            while start < stop:
                got = body.readinto(memory[start:stop])
                assert got
                start += got

        return lambda threads: in_ranges(nbytes, chunk, threads, lambda: part)
    return runai(job)


def runai(job: dict[str, Any]) -> Callable[[int], bytes | None]:
    os.environ |= {
        "AWS_ENDPOINT_URL": job["endpoint"],
        "AWS_ACCESS_KEY_ID": job["access_key"],
        "AWS_SECRET_ACCESS_KEY": job["secret_key"],
        "AWS_REGION": "us-east-1",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_LOG_LEVEL": "ERROR",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    from runai_model_streamer import SafetensorsStreamer

    def read(threads: int) -> bytes | None:
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(threads)
        digest = hashlib.blake2b() if job.get("digest") else None
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([f"s3://{BUCKET}/{KEY}"])
            found = {}
            for name, tensor in streamer.get_tensors():
                if digest:
                    found[name] = tensor.clone()
        if digest is None:
            return None
        return b"".join(found[name].numpy().tobytes() for name in sorted(found))

    return read


def worker(name: str) -> None:
    """Answer each line of stdin, a job, with one line: seconds and CPU seconds."""
    job = json.loads(sys.stdin.readline())
    memory = memoryview(bytearray(job["nbytes"] if name != "runai" else 1))
    memory[::4096] = bytes(len(memory[::4096]))
    read = client(name, job, memory)
    for line in sys.stdin:
        job |= json.loads(line)
        if name == "penstock-cached" and job["cold"]:
            shutil.rmtree(Path(job["folder"]) / "cache", ignore_errors=True)
        before, began = os.times(), time.perf_counter()
        got = read(job["threads"])
        wall = time.perf_counter() - began
        after = os.times()
        answer = {"s": wall, "cpu_s": after.user + after.system - before.user - before.system}
        if job.get("digest"):
            answer["digest"] = hashlib.blake2b(got if got is not None else memory[job["data_at"] :]).hexdigest()
        print(json.dumps(answer), flush=True)


class Client:
    def __init__(self, name: str, job: dict[str, Any], python: str) -> None:
        self.name = name
        environ = {**os.environ, "PYTHONPATH": "packages/penstock/src"} if name not in PEERS else dict(os.environ)
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.bench_objects", "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.say(job)

    def say(self, job: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def measure(self, **job: Any) -> dict[str, Any]:
        self.say({"digest": False, "cold": False} | job)
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def make_object(mib: int) -> tuple[bytes, int]:
    """A safetensors file of 16 MiB tensors, and where its data begins."""
    count = mib // 16
    header = {
        f"t{i:04d}": {"dtype": "F32", "shape": [4 * MIB], "data_offsets": [i * 16 * MIB, (i + 1) * 16 * MIB]}
        for i in range(count)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + random.Random(1).randbytes(MIB) * (16 * count), 8 + len(raw)


@contextlib.contextmanager
def serving(kind: str, folder: Path, data: bytes) -> Iterator[dict[str, str]]:
    """The object behind a server; what clients must know."""
    if kind == "radosgw":
        from tests.support.servers.s3 import RadosgwServer

        with RadosgwServer(folder / "rgw") as server:
            server.make_bucket(BUCKET)
            server.store(BUCKET).put(KEY, data)
            yield {"endpoint": server.endpoint, "access_key": server.access_key, "secret_key": server.secret_key}
        return
    if kind == "rangeserver":  # for a look at the benchmark itself: it shares this process's interpreter
        from tests.support.servers.http_server import RangeServer

        with RangeServer({f"{BUCKET}/{KEY}": data}) as plain_server:
            yield {"endpoint": plain_server.url, "access_key": "any", "secret_key": "any"}
        return
    from tests.support.ports import free_ports

    port = free_ports(1)[0]
    (folder / BUCKET).mkdir()
    (folder / BUCKET / KEY).write_bytes(data)
    folder.chmod(0o755)
    (folder / "nginx.conf").write_text(
        f"worker_processes 2; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        + ("user root;\n" if os.getuid() == 0 else "")
        + "events { worker_connections 512; }\n"
        + "http { access_log off; sendfile on; tcp_nopush on; sendfile_max_chunk 2m; keepalive_requests 1000000;\n"
        + f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    process = subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
                break
            time.sleep(0.05)
        yield {"endpoint": f"http://127.0.0.1:{port}", "access_key": "any", "secret_key": "any"}
    finally:
        process.terminate()
        process.wait(30)


def measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    data, data_at = make_object(arguments.mib)
    digest = hashlib.blake2b(memoryview(data)[data_at:]).hexdigest()
    folder = Path(tempfile.mkdtemp(prefix="ps-bo-", dir=arguments.dir))
    clients: dict[str, Client] = {}
    try:
        with serving(kind, folder, data) as where:
            job = {**where, "nbytes": len(data), "data_at": data_at, "folder": str(folder)}
            job["chunk_bytes"] = arguments.chunk_mib * MIB
            for name in arguments.clients.split(","):
                python = arguments.peers if name in PEERS else sys.executable
                clients[name] = Client(name, job, python)
            cases = [
                (name, threads, cold)
                for name in clients
                for threads in arguments.threads
                for cold in ((True, False) if name == "penstock-cached" else (False,))
            ]
            for name, each in clients.items():
                answer = each.measure(threads=arguments.threads[0], digest=True)
                assert answer["digest"] == digest, f"{name} read other bytes"
            found: dict[tuple[str, int, bool], list[dict[str, Any]]] = {case: [] for case in cases}
            for _ in range(arguments.reps):
                order = {threads: random.random() for threads in arguments.threads}  # neighbours in time: one count
                for case in sorted(random.sample(cases, len(cases)), key=lambda each: order[each[1]]):
                    name, threads, cold = case
                    if name == "penstock-cached" and not cold and not (folder / "cache").exists():
                        clients[name].measure(threads=threads)
                    found[case].append(clients[name].measure(threads=threads, cold=cold))
    finally:
        for each in clients.values():
            each.close()
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for (name, threads, cold), runs in found.items():
        beside = found.get(("plain", threads, False), runs)
        ratios = [other["s"] / run["s"] for run, other in zip(runs, beside, strict=True)]
        rates = [len(data) / run["s"] / 1e9 for run in runs]
        rows.append(
            {
                "server": kind,
                "client": name + (" (cold)" if cold else " (warm)" if name == "penstock-cached" else ""),
                "threads": threads,
                "gb_per_s": statistics.median(rates),
                "low": min(rates),
                "high": max(rates),
                "cpu_s_per_512_mib": statistics.median(run["cpu_s"] for run in runs) * 512 * MIB / len(data),
                "paired": statistics.median(ratios),
                "n": len(runs),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for kind in dict.fromkeys(row["server"] for row in rows):
        mine = [row for row in rows if row["server"] == kind]
        limit = max((row["gb_per_s"] for row in mine if row["client"] == "plain"), default=float("nan"))
        peer = max((row["gb_per_s"] for row in mine if row["client"] == "runai"), default=float("nan"))
        lines += [
            f"\n### {kind}: limit (plain client, its best) {limit:.2f} GB/s\n",
            "| client | threads | GB/s median | min-max | of the limit | paired | x Run:ai | CPU s / 512 MiB | n |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in mine:
            lines.append(
                f"| {row['client']} | {row['threads']} | {row['gb_per_s']:.2f} | {row['low']:.2f}-{row['high']:.2f} "
                f"| {row['gb_per_s'] / limit:.2f} | {row['paired']:.2f} | {row['gb_per_s'] / peer:.1f} "
                f"| {row['cpu_s_per_512_mib']:.2f} | {row['n']} |"
            )
    return "\n".join(lines)


def versions(python: str) -> str:
    names = ["obstore", "boto3", "runai-model-streamer", "runai-model-streamer-s3"]
    code = "import sys, importlib.metadata as m\nprint(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    told = subprocess.run([python, "-c", code, *names], capture_output=True, text=True).stdout.strip()
    try:
        own = version("penstock")
    except PackageNotFoundError:
        own = "?"
    here = f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores"
    return f"penstock {own}, {told}, {here}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="nginx,radosgw", help="of nginx, radosgw, rangeserver")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--mib", type=int, default=512, help="size of the object; a multiple of 16")
    parser.add_argument("--chunk-mib", type=int, default=8)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16])
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--peers", default=".venv-bench/bin/python", help="interpreter with the peers installed")
    parser.add_argument("--dir", default="/dev/shm", help="where the served file and the cache lie")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    rows = [row for kind in arguments.servers.split(",") for row in measure(kind, arguments)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(versions(arguments.peers))
    print(f"object {arguments.mib} MiB, ranges of {arguments.chunk_mib} MiB, {arguments.reps} repetitions, interleaved")
    print(table(rows))


if __name__ == "__main__":
    main()
