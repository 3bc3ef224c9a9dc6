"""Sync beside its peers: trainer ranks to inference ranks, one command, one machine, one run, one page.

    python -m benchmarks.bench_sync --out benchmarks/results/h200x4_202611     four GPUs, 64 GB, under 150 s
    python -m benchmarks.bench_sync --small                                    the CPU, gloo, 64 MB
    python -m benchmarks.bench_sync --rows together                            one version for the fleet, beside others

Ranks are processes that live through the run (`sync_worker`): the first half trainers, the others engines. Values
change from version to version; after each kind of row some tensors are compared, bit for bit, outside of the clock.
What matters most comes first; the page and the samples are written anew after each part, so that a run that is cut off
leaves what it found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_fetch import Bench, Failed, rates
from benchmarks.fetch_page import page

from benchmarks import sync_worker

METHOD = (
    "ranks are processes of one host, the hub is of this run alone; medians of versions from the third on (least-"
    "most); a version's seconds are from the first call of publish to the last engine's return from update, a "
    "broadcast's from barrier to barrier; every byte synced is digested at both ends and compared; broadcasts are "
    "from a rank that is given every tensor whole, gathering not counted, and are not verified; fp8: publishers "
    "quantise each version, receivers of a broadcast the part that they keep, with the same kernel; GB are 10^9 bytes"
)
GOALS = {
    "packed": {
        "llama, live, direct": 2.2,
        "llama, live, staged": 2.0,
        "llama, snapshot, staged": 1.9,
        "fp8, live, direct": 3.0,
        "fp8, live, staged": 3.0,
    },
    "per tensor": {"moe, live, direct": 5.0},
}
"""Times as fast as a broadcast, by how it is made and what is synced."""


class SyncBench(Bench):
    """A run of the benchmark."""

    serve = staticmethod(sync_worker.serve)

    def __init__(self, asked: argparse.Namespace, stack: ExitStack, out: Path) -> None:
        super().__init__(asked, stack)
        self._out = out
        half = asked.world_size // 2
        self.trainers, self.engines = list(range(half)), list(range(half, asked.world_size))
        self.version = self.turn = 0
        """Published since `open`; trained since `make`: what values are of."""
        self.limit = 0.0
        self.walls: dict[str, float] = {}
        """Median seconds of a version, by what was synced and how."""

    def send(self, ranks: Sequence[int], name: str, **arguments: Any) -> list[Any]:
        """As `ask`, each rank told its place among these."""
        for place, rank in enumerate(ranks):
            self.pipes[rank].send((name, arguments | {"rank": place, "world_size": len(ranks)}))
        return self.heard(ranks)

    def heard(self, ranks: Sequence[int]) -> list[Any]:
        """Return the answer of each worker."""
        said, faults = [], []
        for rank in ranks:
            try:
                said.append(self.hear(self.pipes[rank]))
            except Failed as error:
                faults.append(f"rank {rank}: {error}")
        if faults:
            raise Failed("; ".join(faults))
        return said

    def open(self, mode: str, source: str, replica: str = "device") -> None:
        """Publishers and subscribers of what was made."""
        self.version = 0
        self.send(self.trainers, "publish_as", hub=self.hub, mode=source, replica=replica)
        self.send(self.engines, "subscribe", hub=self.hub, mode=mode)

    def close(self) -> None:
        self.ask(range(self.asked.world_size), "end_sync")

    def step(self, commit: str = "each") -> dict[str, Any]:
        """Send one version and return its measurements."""
        self.version, self.turn = self.version + 1, self.turn + 1
        for rank in self.engines:
            self.pipes[rank].send(("update", {"version": self.version}))
        for rank in self.trainers:
            self.pipes[rank].send(("publish", {"version": self.version, "commit": commit}))
        said = self.heard([*self.trainers, *self.engines])  # of all, also where one failed: what is asked next is apart
        published, updated = said[: len(self.trainers)], said[len(self.trainers) :]
        if any(one["bad"] for one in published):
            raise Failed("a publish was late for somebody, or failed for somebody")
        begun = min(one["begun"] for one in published)
        return {
            "wall_s": max(one["ended"] for one in updated) - begun,
            "published_s": max(one["ended"] - one["begun"] for one in published),
            "heard_s": max(one["heard"] for one in updated) - begun,
            "published": published,
            "updated": updated,
        }

    def make(self, kind: str, nbytes: int) -> int:
        """Shards and models; bytes of the checkpoint."""
        self.turn = 0
        given = {"kind": kind, "nbytes": nbytes, "arena": not self.asked.no_arena, "few": self.asked.few}
        made = self.send(self.trainers, "train", **given)
        self.send(self.engines, "serve", **given)
        return sum(int(one["nbytes"]) for one in made)

    def save(self) -> None:
        """Write the results so far."""
        took_s = self.asked.budget_s - self.left_s()
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "sync.md").write_text(
            page(self.rows, self.asked.device, took_s, what="Sync", method=METHOD), encoding="utf-8"
        )
        with (self._out / "sync.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(sample) + "\n" for sample in self.samples)


def share_of(rate: float, limit: float, where: str) -> str:
    """Return a rate in decimal GB/s and its share of the limit; a limit of 0 was not measured in this run."""
    told = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{told} GB/s {where} ({f'{rate / limit:.0%} of the limit' if limit else 'limit not measured'})"


def spread(found: Sequence[float]) -> str:
    """Milliseconds."""
    return f"{1e3 * statistics.median(found):.1f} ms ({1e3 * min(found):.1f}-{1e3 * max(found):.1f})"


def versions(bench: SyncBench, kind: str, nbytes: int, mode: str, source: str, replica: str = "device") -> None:
    """Some versions one way; a row of their seconds, and one of the pause and the memory."""
    bench.open(mode, source, replica)
    name = f"{kind}, {source}{' to pinned host memory' if replica == 'cpu' else ''}, {mode}"
    try:
        prepare_s = max(bench.ask(bench.engines, "prepare"))  # what an engine does once; see `bench_first_version`
        first, second = bench.step(), bench.step()  # in the second an engine finds out what changes
        steady = [bench.step() for _ in range(bench.asked.reps)]
        bench.samples.append({"row": name, "nbytes": nbytes, "first": first, "second": second, "steady": steady})
        count = sum(bench.ask(bench.engines, "check", turn=bench.turn, count=12))
    finally:
        bench.close()
    walls = [one["wall_s"] for one in steady]
    wall = bench.walls[name] = statistics.median(walls)
    each = steady[0]["updated"][0]["nbytes"]
    updates = [one for turn in steady for one in turn["updated"]]
    parts = {part: statistics.median(one[f"{part}_s"] for one in updates) for part in ("plan", "wire", "pause", "wall")}
    told = ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in parts.items())
    path = updates[-1]["path"]
    into = share_of(each / wall / 1e9, bench.limit, f"into each of {len(bench.engines)}")
    if kind == "fp8":
        quantised = [one["transform_s"] for turn in steady for one in turn["published"]]
        into += f"; quantised within {spread(quantised)}"
    bench.row(
        f"{name}: a version",
        f"{bench.limit:.0f} GB/s into each" if bench.limit else "limit not measured",
        spread(walls),
        f"{into}; update's {told} ms; publish returned after {spread([one['published_s'] for one in steady])}; "
        f"prepared in {prepare_s:.2f} s, first version {first['wall_s']:.2f} s, second {second['wall_s']:.2f} s; "
        f"{count} tensors alike; {path}",
    )
    what = "flip and hooks" if mode == "staged" else "reads of the rest, and the copy of what was staged"
    bench.row(
        f"{name}: pause",
        "<= 100 ms for 32 GB" if mode == "staged" else "",
        spread([one["pause_s"] for one in updates]),
        f"{what}; {updates[-1]['staging_bytes'] / 1e9:.3g} GB of staging memory beside {each / 1e9:.3g} GB of weights",
    )


def together(bench: SyncBench) -> None:
    """Versions that all engines commit together, in turns with versions that each takes by itself."""
    nbytes = bench.make("llama", bench.asked.bytes_of["llama"])
    for source in ("live", "snapshot"):
        attempt(bench, f"together, {source}", lambda s=source: _in_turns(bench, nbytes, s))


def _in_turns(bench: SyncBench, nbytes: int, source: str) -> None:
    bench.open("staged", source)
    turns: dict[str, list[dict[str, Any]]] = {"each": [], "together": []}
    try:
        # The first two versions record and measure; see `versions`.
        for _ in range(2):
            bench.step()
        for _ in range(2 * bench.asked.reps):
            for commit, found in turns.items():
                found.append(bench.step(commit))
        bench.ask(bench.engines, "check", turn=bench.turn, count=6)
    finally:
        bench.close()
    bench.samples.append({"row": f"together, {source}", "nbytes": nbytes, "turns": turns})
    pauses = {kind: [one["pause_s"] for turn in found for one in turn["updated"]] for kind, found in turns.items()}
    walls = {kind: [turn["wall_s"] for turn in found] for kind, found in turns.items()}
    apart = [max(e["ended"] for e in turn["updated"]) - min(e["ended"] for e in turn["updated"])
             for turn in turns["together"]]  # fmt: skip
    for what, goal, found in (("pause", "at most 5 ms more", pauses), ("a version", "", walls)):
        more = statistics.median(found["together"]) - statistics.median(found["each"])
        bench.row(
            f"together, {source}, staged: {what}",
            goal,
            spread(found["together"]),
            f"{1e3 * more:+.1f} ms beside {spread(found['each'])} where each engine commits by itself, in turns; "
            f"{len(bench.engines)} engines, the last went live {spread(apart)} after the first",
        )


def beside(bench: SyncBench, kind: str, nbytes: int, how: str, reps: int) -> None:
    """The same by broadcast; models are filled, and sync's best is held beside."""
    ranks = [0, *bench.engines]
    store = f"{bench.directory}/store {kind} {how}"
    given = {"store": store, "how": how, "kind": kind, "nbytes": bench.asked.bytes_of[kind], "reps": reps}
    times = bench.send(ranks, "broadcast", **given)
    slowest = [max(turn) for turn in zip(*times, strict=True)]
    bench.samples.append({"row": f"broadcast {kind} {how}", "nbytes": nbytes, "seconds": slowest})
    what = "gloo" if bench.asked.small else "NCCL"
    took = statistics.median(slowest)
    then = ", then quantised" if kind == "fp8" else ""
    found = rates([nbytes / one / 1e9 for one in slowest])
    bench.row(f"{kind}: {what} broadcast, {how}{then}", "", spread(slowest), found)
    for name, wall in bench.walls.items():
        if name.startswith(kind) and "host" not in name:
            goal = GOALS[how].get(name)
            target = f">= {goal}x" if goal else ""
            bench.row(f"{name}, beside {what} {how}", target, f"{took / wall:.2f}x", "wall time of a version")


def limits(bench: SyncBench) -> None:
    """Plain copies, alone and into all engines at once."""
    nbytes = (64 << 20) if bench.asked.small else (4 << 30)
    alone = bench.ask(bench.engines[:1], "limit", nbytes=nbytes, far=0)[0]
    for rank in bench.engines:
        bench.pipes[rank].send(("limit", {"nbytes": nbytes, "far": rank - len(bench.trainers)}))
    each = bench.heard(bench.engines)
    bench.limit = alone
    bench.row("limit: one plain copy", "", f"{alone:.0f} GB/s", f"into each engine at once: {rates(each)}")


def llama(bench: SyncBench) -> None:
    """FSDP's rows to tensor parallel, each way; then a broadcast."""
    nbytes = bench.make("llama", bench.asked.bytes_of["llama"])
    for mode, source in (("direct", "live"), ("staged", "live"), ("staged", "snapshot")):
        attempt(bench, f"llama, {source}, {mode}", lambda m=mode, s=source: versions(bench, "llama", nbytes, m, s))
    attempt(bench, "llama, broadcast packed", lambda: beside(bench, "llama", nbytes, "packed", bench.asked.reps))


def sleep(bench: SyncBench) -> None:
    """Engines give their weights up and take them back from the trainer's snapshot, all at once."""
    bench.make("llama", bench.asked.bytes_of["llama"])
    for mode in ("staged", "direct"):
        bench.open(mode, "snapshot")
        try:
            bench.step()
            turns = [bench.ask(bench.engines, "sleep_and_wake") for _ in range(bench.asked.reps + 1)][1:]
            bench.samples.append({"row": f"sleep, {mode}", "turns": turns})
            bench.ask(bench.engines, "check", turn=bench.turn, count=12)
        finally:
            bench.close()
        every = [one for turn in turns for one in turn]
        rate = rates([one["nbytes"] / one["restore_s"] / 1e9 for one in every])
        given = every[0]["given_back"]
        where = f"; {given / 1e9:.3g} GB given back to the device" if given else ""
        bench.row(f"sleep, {mode}: release", "", spread([one["release_s"] for one in every]), f"per engine{where}")
        bench.row(f"sleep, {mode}: restore", "", spread([one["restore_s"] for one in every]), f"{rate} into each")


def fp8(bench: SyncBench) -> None:
    """The same to engines that serve codes and scales."""
    nbytes = bench.make("fp8", bench.asked.bytes_of["fp8"])
    attempt(bench, "fp8, live, direct", lambda: versions(bench, "fp8", nbytes, "direct", "live"))
    attempt(bench, "fp8, live, staged", lambda: versions(bench, "fp8", nbytes, "staged", "live"))
    attempt(bench, "fp8, broadcast packed", lambda: beside(bench, "fp8", nbytes, "packed", bench.asked.reps))


def tensors(bench: SyncBench) -> None:
    """The dense model by a broadcast for each tensor."""
    nbytes = bench.make("llama", bench.asked.bytes_of["llama"])
    attempt(bench, "llama, broadcast per tensor", lambda: beside(bench, "llama", nbytes, "per tensor", 2))


def moe(bench: SyncBench) -> None:
    """Small tensors of experts, dealt out."""
    nbytes = bench.make("moe", bench.asked.bytes_of["moe"])
    attempt(bench, "moe, live, direct", lambda: versions(bench, "moe", nbytes, "direct", "live"))
    attempt(bench, "moe, broadcast per tensor", lambda: beside(bench, "moe", nbytes, "per tensor", 1))
    attempt(bench, "moe, broadcast packed", lambda: beside(bench, "moe", nbytes, "packed", 2))


def host(bench: SyncBench) -> None:
    """A snapshot in pinned host memory; what it and its readers cost training."""
    nbytes = bench.make("llama", bench.asked.bytes_of["host"])
    bare = bench.ask(bench.trainers, "copy_to_host")
    bench.open("staged", "snapshot", "cpu")
    try:
        turns = [bench.step() for _ in range(bench.asked.reps + 2)]
        copies = [one["ended"] - one["begun"] for turn in turns[2:] for one in turn["published"]]
        ratio = statistics.median(copies) / statistics.median(bare)
        bench.samples.append({"row": "host", "bare": bare, "turns": turns})
        detail = f"{ratio:.2f}x of the bare copy, {spread(bare)}; {nbytes / len(bench.trainers) / 1e9:.1f} GB a rank"
        bench.row("snapshot to pinned host memory: publish", "<= 1.1x of the bare copy", spread(copies), detail)
        updates = [one for turn in turns[2:] for one in turn["updated"]]
        found = [one["nbytes"] / one["wire_s"] / 1e9 for one in updates]
        bench.row("... and the pull of it", "55 GB/s per GPU", rates(found), updates[-1]["path"])
        span = 0.3 if bench.asked.small else 1.0
        alone = bench.ask(bench.trainers[:1], "steps", seconds=span)[0]
        pulled = _steps_while_pulled(bench, span)
        slower = statistics.median(pulled) / statistics.median(alone) - 1
        bench.row(
            "... training step meanwhile", "unaffected", f"{slower:+.1%}", f"{spread(pulled)}, alone {spread(alone)}"
        )
        bench.ask(bench.engines, "check", turn=bench.turn, count=6)
    finally:
        bench.close()


def _steps_while_pulled(bench: SyncBench, seconds: float) -> list[float]:
    """Training steps, as engines read a version that was published."""
    bench.version, bench.turn = bench.version + 1, bench.turn + 1
    for rank in bench.trainers:
        bench.pipes[rank].send(("publish", {"version": bench.version}))
    bench.heard(bench.trainers)
    for rank in bench.engines:
        bench.pipes[rank].send(("update", {"version": bench.version}))
    bench.pipes[bench.trainers[0]].send(("steps", {"seconds": seconds}))
    found: list[float]
    *updated, found = bench.heard([*bench.engines, bench.trainers[0]])
    bench.samples.append({"row": "steps while pulled", "updated": updated, "steps": found})
    return found[: max(1, int(len(found) * min(1.0, updated[0]["wall_s"] / seconds)))]


def attempt(bench: SyncBench, name: str, part: Callable[[], object]) -> None:
    """A part of the page; one that fails says so."""
    try:
        if bench.left_s() < 3:
            raise Failed("no time left")
        part()
    except Failed as error:
        bench.row(name, "", "not measured", str(error).splitlines()[0][:300])
    bench.save()


PARTS: dict[str, Callable[[SyncBench], None]] = {
    "limits": limits,
    "llama": llama,
    "together": together,
    "sleep": sleep,
    "fp8": fp8,
    "moe": moe,
    "host": host,
    "tensors": tensors,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="on the CPU, 64 MB")
    parser.add_argument(
        "--total-gb", type=float, default=0.0, help="of the dense model; default 64; 0.064 with --small"
    )
    parser.add_argument("--world-size", type=int, default=4, help="ranks; half of them train")
    parser.add_argument("--reps", type=int, default=4)
    parser.add_argument("--rows", default="", help=f"{','.join(PARTS)}; default all")
    parser.add_argument("--no-arena", action="store_true", help="leave tensors where torch puts them")
    parser.add_argument("--budget-s", type=float, default=145.0)
    parser.add_argument("--out", default="benchmarks/results/local")
    asked = parser.parse_args()
    asked.device, asked.few = "cpu" if asked.small else "cuda", asked.small
    total = int(1e9 * (asked.total_gb or (0.064 if asked.small else 64.0)))
    asked.bytes_of = {"llama": total, "fp8": total, "moe": total // 2, "host": total // 4}
    asked.total_gb, asked.files_dir = total / 1e9, tempfile.gettempdir()
    out = Path(asked.out)
    with ExitStack() as stack:
        bench = SyncBench(asked, stack, out)
        bench.start()
        for name in asked.rows.split(",") if asked.rows else PARTS:
            attempt(bench, name, lambda part=PARTS[name]: part(bench))
            attempt(bench, f"{name}: an end", lambda: bench.ask(range(asked.world_size), "leave"))
    print((out / "sync.md").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
