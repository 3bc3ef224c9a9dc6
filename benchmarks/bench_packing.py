"""Seconds of a sync of column strips over a transport between hosts, with packing at the source and without.

    python -m benchmarks.bench_packing [--transport http] [--mb 64] [--runs 256,1024,4096,16384,65536] [--reps 5]

In: two processes of this machine; one publishes tensors of bytes whole, the other receives columns of each: runs of the
given length. Out: a line of JSON for each length: seconds of reading and verifying, with packing and without in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

import torch

import penstock as ps
from penstock.plan.packing import PACK_BYTES, PACK_RUN_BYTES

SHARE = 8
"""Tensor-parallel ranks: the receiver is one of them, and takes an eighth of the columns."""
NUM_TENSORS = 8


def shape(run: int, nbytes: int) -> tuple[int, int]:
    """Return the shape of each tensor, of which the receiver takes runs of `run` bytes."""
    return nbytes // NUM_TENSORS // run, run * SHARE


def publish(name: str, run: int, nbytes: int, transport: str, pack_bytes: int) -> None:
    """Publish versions as lines come from standard input."""
    chance = torch.Generator().manual_seed(1)
    size = shape(run, nbytes)
    tensors = {
        f"layers.{i}.w": torch.randint(0, 256, size, dtype=torch.uint8, generator=chance) for i in range(NUM_TENSORS)
    }
    connection = ps.ConnectionSettings(transports=[transport])
    with ps.publisher(
        name, tensors, mode="live", connection=connection, settings=ps.sync.PublisherSettings(pack_bytes=pack_bytes)
    ) as publisher:
        print("joined", flush=True)
        publisher.wait_subscribers(1)
        for line in sys.stdin:
            for tensor in tensors.values():
                tensor += 1
            report = publisher.publish(version=int(line))
            assert len(report.committed) == 1, report.summary()
            print("published", flush=True)


class Pair:
    """A publisher's process and a receiver in this one; a context manager."""

    def __init__(self, run: int, nbytes: int, transport: str, pack_bytes: int) -> None:
        name = f"packing-{os.getpid()}-{run}-{pack_bytes}"
        command = [sys.executable, "-m", "benchmarks.bench_packing", "--publish", name, "--runs", str(run)]
        command += ["--mb", str(nbytes / 1e6), "--transport", transport, "--pack-bytes", str(pack_bytes)]
        rows, columns = shape(run, nbytes)
        mine = {
            f"layers.{i}.w": ps.Shard(
                tensor=torch.zeros(rows, run, dtype=torch.uint8), global_shape=(rows, columns), offset=(0, 3 * run)
            )
            for i in range(NUM_TENSORS)
        }
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("joined")
        connection = ps.ConnectionSettings(transports=[transport])
        self._subscriber = ps.subscriber(name, mine, connection=connection)

    def _answer(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"

    def update(self, version: int) -> ps.UpdateReport:
        """Have a version published, and take it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version}\n")
        self._process.stdin.flush()
        self._subscriber.wait(version)
        report = self._subscriber.update()
        self._answer("published")
        return report

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._subscriber.close()
        self._process.stdin.close()
        self._process.wait(60)


def spread(seconds: list[float]) -> str:
    """Return median and extremes."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


def measure(run: int, nbytes: int, transport: str, reps: int) -> dict[str, object]:
    """Return the seconds of reading and verifying without packing and with it, in turns."""
    found: dict[int, list[float]] = {0: [], PACK_BYTES: []}
    with Pair(run, nbytes, transport, 0) as plain, Pair(run, nbytes, transport, PACK_BYTES) as packing:
        for version in range(reps + 1):
            for pack_bytes, pair in ((0, plain), (PACK_BYTES, packing)):
                report = pair.update(version)
                assert bool(report.packed_bytes) == (pack_bytes > 0 and run < PACK_RUN_BYTES), report
                if version:  # the first one plans, connects, and allocates
                    found[pack_bytes].append(report.phases["wire"])
    ratios = sorted(a / b for a, b in zip(found[0], found[PACK_BYTES], strict=True))
    return {
        "plain_s": spread(found[0]),
        "packed_s": spread(found[PACK_BYTES]),
        "paired": f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f})",
    }


def main() -> None:
    """Print a line for each length of run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="http")
    parser.add_argument("--mb", type=float, default=64.0)
    parser.add_argument("--runs", default="256,1024,4096,16384,65536")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--publish", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pack-bytes", type=int, default=PACK_BYTES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    nbytes, runs = int(args.mb * 1e6), [int(run) for run in args.runs.split(",")]
    if args.publish:
        publish(args.publish, runs[0], nbytes, args.transport, args.pack_bytes)
        return
    for run in runs:
        found = measure(run, nbytes, args.transport, args.reps)
        line = {"transport": args.transport, "run_bytes": run, "mb": args.mb, "n": args.reps, **found}
        print(json.dumps(line | {"load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
