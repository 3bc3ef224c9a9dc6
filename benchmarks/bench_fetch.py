"""Fetch beside its peers: one command, one machine, one run, one page.

    python -m benchmarks.bench_fetch --out benchmarks/results/h200x4_202611     up to four GPUs, 60 GB, under 150 s
    python -m benchmarks.bench_fetch --small                                    the CPU, gloo, 256 MB

Rows: one holder to the other workers; as many bytes by a broadcast of torch.distributed; the source decoding meanwhile;
an engine that attaches to a keeper; each worker's own load; workers that start at once, cold. Workers are processes
that live through the run (`fetch_worker`); attaching engines are new ones. A row that fails or has no time says so.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.fetch_page import page
from benchmarks.load import cache
from tests.support.keeper import KeeperProcess

from benchmarks import fetch_worker
from penstock.testing.checkpoints import write_llama
from penstock_tools.bench_command import private_hub

SCRUB_S = 0.7
"""Pause before fetches: memory that was just given back keeps who allocates it waiting, 0.2 s for 60 GB at once, 0.1 s
after this, 0.03 s where it was never used. Source: docs/design/fetch.md."""
OBJECT_STORE_GB_PER_S = 1.25
"""Of the 10 Gb/s object store that a fetch is held beside: its link, which no reader beats."""

ROWS = ("broadcast", "fetch", "decode", "attach", "cold", "own loads")


class Failed(Exception):
    """A worker failed, or no time is left; the row says so."""


class Bench:
    """A run of the benchmark."""

    serve = staticmethod(fetch_worker.serve)

    def __init__(self, asked: argparse.Namespace, stack: ExitStack) -> None:
        self.asked, self.stack = asked, stack
        self.began = time.monotonic()
        self.directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        self.files = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=asked.files_dir))
        self.hub = stack.enter_context(private_hub(self.directory))
        self.nbytes = int(asked.total_gb * 1e9)
        self.rows: list[list[str]] = []
        self.samples: list[dict[str, Any]] = []
        self.pipes: list[Connection] = []

    def left_s(self) -> float:
        return float(self.asked.budget_s) - (time.monotonic() - self.began)

    def rest(self) -> None:
        """See `SCRUB_S`."""
        if self.asked.device == "cuda":
            time.sleep(SCRUB_S)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def process(self, rank: int) -> Iterator[Connection]:
        """A worker, once it is ready, for the block."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        given = (there, rank, self.asked.world_size, self.asked.device)
        process = context.Process(target=self.serve, args=given, daemon=True)
        process.start()
        there.close()
        try:
            yield here
        finally:
            here.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def hear(self, pipe: Connection) -> Any:
        if not pipe.poll(max(1.0, self.left_s())):
            raise Failed("no answer in the time there is")
        try:
            said = pipe.recv()
        except EOFError:
            raise Failed("the worker died") from None
        if isinstance(said, dict) and "error" in said:
            raise Failed(said["error"])
        return said

    def ask(self, ranks: Sequence[int], name: str, **arguments: Any) -> list[Any]:
        """Tell workers at once to do something; what each gives."""
        for rank in ranks:
            self.pipes[rank].send((name, arguments))
        said, faults = [], []
        for rank in ranks:
            try:
                said.append(self.hear(self.pipes[rank]))
            except Failed as error:
                faults.append(f"worker {rank}: {error}")
        if faults:
            raise Failed("; ".join(faults))
        self.samples.append({"asked": name, "ranks": list(ranks), "said": said} | {"arguments": str(arguments)})
        return said

    def ask_new(self, ranks: Sequence[int], name: str, **arguments: Any) -> list[Any]:
        """Tell new workers, which end afterwards, to do something; what each gives."""
        before = list(self.pipes)
        with ExitStack() as stack:
            try:
                for rank in ranks:
                    self.pipes[rank] = stack.enter_context(self.process(rank))
                for rank in ranks:
                    self.hear(self.pipes[rank])
                self.rest()
                return self.ask(ranks, name, **arguments)
            finally:
                self.pipes = before

    def row(self, work: str, goal: str, found: str, detail: str) -> None:
        self.rows.append([work, goal, found, detail])
        self.say(f"{work}: {found} ({detail})")

    def start(self) -> None:
        self.pipes = [self.stack.enter_context(self.process(rank)) for rank in range(self.asked.world_size)]
        for pipe in self.pipes:
            self.hear(pipe)
        self.say("workers are ready")


def rates(found: Sequence[float]) -> str:
    """Return the median of rates in decimal GB/s, and their spread; a rate of nothing was not measured."""
    if not found or min(found) <= 0:
        return "not measured"
    # Two digits at least, so that a small run does not print "0.0 GB/s".
    digits = max(1, 2 - math.ceil(math.log10(min(found))))
    return f"{statistics.median(found):.{digits}f} GB/s ({min(found):.{digits}f}-{max(found):.{digits}f})"


def seconds(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.3f} s ({min(found):.3f}-{max(found):.3f})"


def fetches(bench: Bench) -> None:
    """Measure fetches from one holder by all others; then the same while the source decodes."""
    others = range(1, bench.asked.world_size)
    limit = bench.ask([1], "limit", nbytes=min(bench.nbytes, 4 << 30))[0]
    bench.row("limit: one plain copy", "", f"{limit:.1f} GB/s", "between two devices; on the CPU one thread in memory")
    chain = bench.ask(others, "limit", nbytes=min(bench.nbytes, 4 << 30), seconds=0.6)
    bench.row("limit: plain copies in a chain", "", rates(chain), "all receivers at once, each from the one before")
    held = bench.ask([0], "hold", hub=bench.hub, nbytes=bench.nbytes)[0]
    first = bench.ask(others, "fetch", hub=bench.hub)
    bench.row("first fetch, kernels compiled within", "", seconds([one["wall_s"] for one in first]), paths(first))
    fresh = [one for _ in range(bench.asked.fresh) for one in bench.ask_new(others, "fetch", hub=bench.hub)]
    if fresh:
        bench.row(
            "... by new processes, kernels there: call to committed",
            "< 0.25 s",
            seconds([one["wall_s"] for one in fresh]),
            f"n = {len(fresh)}; {phases_of(fresh)}",
        )
    turns = []
    for _ in range(bench.asked.reps):
        bench.rest()
        turns.append(bench.ask(others, "fetch", hub=bench.hub))
    all_of = [one for turn in turns for one in turn]
    moved = [one["nbytes"] / one["phases"]["move"] / 1e9 for one in all_of]
    size = f"{held['nbytes'] / 1e9:.2f} GB, 1 holder -> {len(others)} receivers"
    how = f"first byte asked for to last one verified, n = {len(all_of)}; {paths(all_of)}"
    bench.row(f"{size}: payload", ">= 375 GB/s per receiver", rates(moved), how)
    bench.row(f"{size}: call to committed", "< 0.25 s", seconds([one["wall_s"] for one in all_of]), phases_of(all_of))
    bench.row(f"{size}: with joining", "", seconds([one["total_s"] for one in all_of]), "import and CUDA start not")
    bench.row("offering: digests of all", "", f"{held['offer_s']:.3f} s", "kernels compiled within")


def phases_of(found: Sequence[dict[str, Any]]) -> str:
    """Return the median of each phase."""
    names = found[0]["phases"]
    return ", ".join(f"{name} {statistics.median(one['phases'][name] for one in found):.3f}" for name in names) + " s"


def decoding(bench: Bench) -> None:
    """Needs the holder of `fetches`."""
    what = bench.ask([0], "prepare_decode")[0]
    others, span = range(1, bench.asked.world_size), 0.5 if bench.asked.small else 2.0
    copied = {"nbytes": min(bench.nbytes, 4 << 30), "seconds": span / 2}
    busy: dict[str, Callable[[], object]] = {
        "during fetches": lambda: bench.ask(others, "fetch", hub=bench.hub),
        "while its device is read by plain copies, no fleet": lambda: bench.ask([1], "limit", **copied),
    }
    found: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for _ in range(1 if bench.asked.small else 3):
        for how, work in ({"alone": None} | busy).items():
            bench.pipes[0].send(("decode", {"seconds": span}))
            try:
                while not bench.pipes[0].poll(0.0 if work else 0.05):
                    if work is not None:
                        work()
                        counts[how] = counts.get(how, 0) + 1
            finally:
                found.setdefault(how, []).append(bench.hear(bench.pipes[0]))
    alone = statistics.median(found["alone"])
    for how in busy:
        rate = statistics.median(found[how])
        bench.row(
            f"source decoding {how}",
            "slowed <= 5 %" if how == "during fetches" else "",
            f"{100 * (1 - rate / alone):.1f} % slower",
            f"{rate:.1f} of {alone:.1f} tokens/s ({min(found['alone']):.1f}-{max(found['alone']):.1f}), in turns; "
            f"{counts[how]} one after another; {what}",
        )
    bench.samples.append({"asked": "decode", "said": found})


def broadcasts(bench: Bench) -> None:
    ranks = range(bench.asked.world_size)
    store = f"{bench.directory}/store"
    times = bench.ask(ranks, "broadcast", store=store, nbytes=bench.nbytes, reps=bench.asked.reps)
    slowest = [max(turn) for turn in zip(*times, strict=True)]
    what = "gloo" if bench.asked.device == "cpu" else "NCCL"
    found = [bench.nbytes / each / 1e9 for each in slowest]
    bench.row(
        f"{what} broadcast of as many bytes", "", rates(found), f"n = {len(found)}; connected before; not verified"
    )


def attaching(bench: Bench, checkpoint: str) -> None:
    device = "cpu" if bench.asked.device == "cpu" else "cuda:0"
    arguments = [checkpoint, "--model", "kept", "--device", device, "--hub", bench.hub, "--drain-s", "1"]
    found: dict[str, list[dict[str, Any]]] = {}
    with KeeperProcess(arguments, timeout_s=max(5.0, bench.left_s())):
        for verify in (True,) if bench.asked.small else (True, True, False):
            with bench.process(0) as engine:  # a new process each: an engine that starts again
                bench.hear(engine)
                engine.send(("attach", {"hub": bench.hub, "name": "kept", "verify": verify}))
                one = bench.hear(engine)
                found.setdefault("compared" if one["verified"] else "not compared", []).append(one)
                bench.samples.append({"asked": "attach", "said": one})
    for how, each in found.items():
        told = ", ".join(f"{name} {value:.3f}" for name, value in each[-1]["phases"].items())
        bench.row(
            f"engine restart on kept weights, {each[0]['nbytes'] / 1e9:.2f} GB, digests {how}",
            "< 0.5 s, no copy",
            seconds([one["seconds"] for one in each]),
            f"first tensor usable; {each[0]['path']}; {told} s",
        )


def cold(bench: Bench, checkpoint: str) -> None:
    """Workers that start at once; beside: each alone, all on their own, and each a part."""
    ranks, kind = range(bench.asked.world_size), cache.file_system(checkpoint)
    alone = bench.ask([0], "load", uri=checkpoint)[0]
    bench.row(
        f"one worker's own load, {kind}",
        "",
        f"{alone['seconds']:.3f} s",
        f"{alone['nbytes'] / alone['seconds'] / 1e9:.1f} GB/s",
    )
    each = bench.ask(ranks, "load", uri=checkpoint)
    bench.row(
        f"{len(ranks)} independent loads at once, {kind}",
        "",
        f"{max(one['seconds'] for one in each):.3f} s",
        "the slowest",
    )
    split, whole = [], []
    for _ in range(max(2, bench.asked.reps)):
        parts = bench.ask(ranks, "load", uri=checkpoint, part=True)
        split.append(max(one["seconds"] for one in parts))
        bench.rest()
        found = bench.ask(ranks, "fetch", hub=bench.hub, fallback=checkpoint)
        bench.ask(ranks, "leave")
        last = max(found, key=lambda one: one["wall_s"])
        whole.append((last, sum(one["storage_bytes"] for one in found)))
        nbytes = found[0]["nbytes"]
    bench.row("one split read: each its part, no exchange", "", seconds(split), "the slowest of each turn")
    times = [last["wall_s"] for last, _ in whole]
    read = max(nbytes_read for _, nbytes_read in whole) / nbytes
    bench.row(
        f"{len(ranks)} workers at once, cold, as a fleet",
        "<= 1.15x of the split read",
        f"{seconds(times)}, {min(times) / min(split):.2f}x",
        f"{paths(found)}; of the last worker {phases_of([last for last, _ in whole])}",
    )
    bench.row("... storage bytes read", "1.0x", f"{read:.3f}x", f"of {nbytes / 1e9:.2f} GB; the worse of two")


def own_loads(bench: Bench) -> None:
    """From the disk, at a size that it gives in some seconds; the object store's time is its link's."""
    files = [str(path) for path in write_llama(f"{bench.directory}/disk", total_bytes=int(bench.asked.disk_gb * 1e9))]
    left = cache.evict(files)
    one = bench.ask([0], "load", uri=f"{bench.directory}/disk")[0]
    rate = one["nbytes"] / one["seconds"] / 1e9
    kind = cache.file_system(files[0])
    fetched = [s for s in bench.samples if s["asked"] == "fetch" and "None" not in s["arguments"]]
    best = min((each["wall_s"] for s in fetched for each in s["said"] if not each["storage_bytes"]), default=0.0)
    for what, gb_per_s in (
        (f"disk ({kind}, {left:.0%} cached)", rate),
        ("10 Gb/s object store, its link", OBJECT_STORE_GB_PER_S),
    ):
        took = bench.nbytes / 1e9 / gb_per_s
        times = f"{took / best:.0f}x of the best fetch" if best else "no fetch to compare with"
        bench.row(
            f"own cold load from {what}", "fetch >= 100x faster", f"{took:.1f} s, {times}", f"at {gb_per_s:.2f} GB/s"
        )


def paths(found: Sequence[dict[str, Any]]) -> str:
    """By which transports the bytes came."""
    total: dict[str, int] = {}
    for one in found:
        for path, nbytes in one["paths"].items():
            name = path.partition(" ")[0]
            total[name] = total.get(name, 0) + nbytes
    whole = sum(total.values()) or 1
    faults = sum(len(one["faults"]) for one in found)
    told = ", ".join(f"{name} {nbytes / whole:.0%}" for name, nbytes in sorted(total.items()))
    return told + (f"; {faults} faults on the way" if faults else "")


def run(bench: Bench) -> None:
    """The rows asked for. Files that any of them needs are written meanwhile by another process: what is disturbed by
    that waits for it."""
    checkpoint = f"{bench.files}/ckpt"
    what = {"total_bytes": bench.nbytes, "fp8": False, "shards": 8}
    writer = multiprocessing.get_context("spawn").Process(target=write_llama, args=(checkpoint,), kwargs=what)
    asked = bench.asked.rows.split(",") if bench.asked.rows else list(ROWS)
    is_writing = bool({"attach", "cold"} & set(asked))
    if is_writing:
        writer.start()
    bench.start()

    def with_files(part: Callable[[Bench, str], None]) -> None:
        if is_writing:
            writer.join(max(0.0, bench.left_s()))
            if writer.exitcode != 0:
                raise Failed("the checkpoint was not written in the time there is")
        part(bench, checkpoint)

    parts: list[tuple[str, Callable[[], None]]] = [
        ("broadcast", lambda: broadcasts(bench)),
        ("fetch", lambda: with_files(lambda bench, _: fetches(bench))),
        ("decode", lambda: decoding(bench)),
        ("free", lambda: bench.ask([0], "leave") and None),
        ("attach", lambda: with_files(attaching)),
        ("cold", lambda: with_files(cold)),
        ("own loads", lambda: own_loads(bench)),
    ]
    for name, part in parts:
        if name not in asked and name != "free":
            continue
        try:
            if bench.left_s() < 3:
                raise Failed("no time left")
            part()
        except (Failed, ChildProcessError, OSError) as error:
            bench.row(name, "", "not measured", str(error).splitlines()[0][:300])
    if is_writing:
        writer.kill()
        writer.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="on the CPU, 256 MB")
    parser.add_argument("--total-gb", type=float, default=0.0, help="default 60; 0.256 with --small")
    parser.add_argument("--disk-gb", type=float, default=0.0, help="of the load from disk; default 8; 0.064")
    parser.add_argument(
        "--world-size", type=int, default=0, help="workers; default: the GPUs, 4 at most; 3 with --small"
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--fresh", type=int, default=0, help="fetches by new processes, as engines that start")
    parser.add_argument("--rows", default="", help=f"{','.join(ROWS)}; default all")
    parser.add_argument("--budget-s", type=float, default=145.0)
    parser.add_argument("--files-dir", default="/dev/shm", help="where the checkpoint is written: a tmpfs with room")
    parser.add_argument("--out", default="benchmarks/results/local")
    asked = parser.parse_args()
    asked.device = "cpu" if asked.small else "cuda"
    asked.total_gb = asked.total_gb or (0.256 if asked.small else 60.0)
    asked.disk_gb = asked.disk_gb or (0.064 if asked.small else 8.0)
    asked.world_size = asked.world_size or (3 if asked.small else min(4, torch.cuda.device_count()))
    if asked.world_size < 2:
        parser.error(f"{asked.world_size} GPUs: a holder and a receiver need two; --small runs on the CPU")
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(asked.files_dir).free < asked.total_gb * 1.05e9:
        asked.files_dir = tempfile.gettempdir()
    with ExitStack() as stack:
        bench = Bench(asked, stack)
        run(bench)
        text = page(bench.rows, asked.device, time.monotonic() - bench.began)
    (out / "fetch.md").write_text(text, encoding="utf-8")
    with (out / "fetch.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(sample) + "\n" for sample in bench.samples)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
