"""Conversions of a far source part of which is in the hosts' caches already: bytes that its server gives.

    python -m benchmarks.bench_locality [--source-bytes 512M] [--home DIR]

The source is two shards on an HTTP server of this machine, the conversion a copy by two workers. One host: both read
through one cache that is empty, has the first shard (it was loaded), or has all. Two hosts: each worker has a cache of
its own, with one of the shards. What is missing is bytes of files; the server's are counted by what it was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.servers.http_server import RangeServer

import penstock
from penstock.config import parse_bytes
from penstock.testing.checkpoints import write_llama
from penstock_convert.convert import ConvertReport, WorkerSettings, convert
from penstock_convert.workers.launch import Launcher, LocalLauncher


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured conversion."""

    case: str
    missing_bytes: int
    """Of the source's files, in no cache."""
    served_bytes: int
    """By the server, without the byte that each opening of a file asks for."""
    fetched_bytes: int
    held_bytes: int
    read_bytes: int
    num_tasks: int
    num_stolen: int
    num_twice: int
    wall_s: float


@contextmanager
def cached(directory: Path | None) -> Iterator[None]:
    """This process, and those that it starts meanwhile, read through this cache."""
    before = os.environ.pop("PENSTOCK_CACHE_DIR", None)
    if directory is not None:
        os.environ["PENSTOCK_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        os.environ.pop("PENSTOCK_CACHE_DIR", None)
        if before is not None:
            os.environ["PENSTOCK_CACHE_DIR"] = before


class Hosts:
    """A launcher of which each worker has a cache of its own, and hears that others may be far away.

    Args:
        caches: of the workers, in the order in which they are started.
    """

    listen: str | None = "127.0.0.1"

    def __init__(self, caches: Sequence[Path]) -> None:
        self._caches, self._hosts = list(caches), dict[str, LocalLauncher]()

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`."""
        host = self._hosts[worker] = LocalLauncher()
        with cached(self._caches[(len(self._hosts) - 1) % len(self._caches)]):
            host.spawn(worker, device, address, secret)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`."""
        return self._hosts[worker].ended(worker)

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        self._hosts[worker].kill(worker)

    def close(self) -> None:
        """End all."""
        for host in self._hosts.values():
            host.close()


def served(server: RangeServer) -> int:
    """Bytes of weights that were asked for since the last call; see `Row`."""
    found: Counter[str] = Counter()
    for request in server.requests:
        if request.path.endswith(".safetensors") and request.range is not None:
            start, stop = request.range
            found[request.path] += stop - start if stop - start > 1 else 0
    server.requests.clear()
    return found.total()


def rows(source: Path, home: Path, task_bytes: int | str) -> Iterator[Row]:
    """Every case, in a directory that is empty.

    Args:
        source: a checkpoint in two files.
        task_bytes: see `convert`.
    """
    first, second = sorted(source.glob("*.safetensors"))
    with RangeServer(source) as server, ExitStack() as stack:
        index = f"{server.url}/model.safetensors.index.json"

        def row(case: str, missing_bytes: int, launcher: Launcher) -> Row:
            served(server)
            workers = WorkerSettings(num_workers=2, launcher=launcher, task_bytes=task_bytes)
            report = convert(index, home / "out", devices="cpu", workers=workers)
            if not penstock.verify(home / "out").verified:
                raise SystemExit(f"{case}: the result is not what its manifest says")
            shutil.rmtree(home / "out")
            return row_of(case, missing_bytes, served(server), report)

        with cached(home / "cache"), LocalLauncher() as one_host:
            for case, shards in (("cold", []), ("half in the cache", [first]), ("all in the cache", [first, second])):
                shutil.rmtree(home / "cache", ignore_errors=True)
                for shard in shards:
                    penstock.load(f"{server.url}/{shard.name}")
                here = sum(shard.stat().st_size for shard in shards)
                yield row(case, first.stat().st_size + second.stat().st_size - here, one_host)
        caches = [home / "host 1", home / "host 2"]
        for cache, shard in zip(caches, (first, second), strict=True):
            with cached(cache):
                penstock.load(f"{server.url}/{shard.name}")
        launcher = Hosts(caches)
        stack.callback(launcher.close)
        yield row("two hosts, a half each", 0, launcher)


def row_of(case: str, missing_bytes: int, served_bytes: int, report: ConvertReport) -> Row:
    """A report as a row."""
    return Row(
        case=case,
        missing_bytes=missing_bytes,
        served_bytes=served_bytes,
        fetched_bytes=report.fetched_bytes,
        held_bytes=report.held_bytes,
        read_bytes=report.read_bytes,
        num_tasks=report.num_tasks,
        num_stolen=report.num_stolen,
        num_twice=report.num_twice,
        wall_s=round(report.wall_s, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source-bytes", type=parse_bytes, default=512_000_000)
    parser.add_argument("--task-bytes", default="16M")
    parser.add_argument("--home", help="where caches and results are; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-locality-", dir=options.home) as directory:
        home = Path(directory)
        write_llama(home / "source", total_bytes=options.source_bytes, shards=2)
        for row in rows(home / "source", home, options.task_bytes):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
