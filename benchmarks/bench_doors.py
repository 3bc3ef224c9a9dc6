"""Every way in which users load weights, in whole new processes, by Penstock and by the original in turns.

    python -m benchmarks.bench_doors --gib 1 --runs 5 --out benchmarks/results/cpu2_202611
    python -m benchmarks.bench_doors --device cuda --gib 9 --out benchmarks/results/local
    python -m benchmarks.bench_doors --doors "load_file|safe_open" --small 30000

The clock starts before the import of the library, for a GPU after torch has created its context, and ends when one byte
of each page of every tensor was read on the host, or when the GPU is synchronised. `door_worker` is the process.

States: `kept`: the home directory, with all caches in it, was used before, and the files are in the page cache. `new`:
each process has a new home. `cold`: a kept home, and files that are not in the page cache, which needs a disk. `hub`: a
new home, and files from a hub on loopback. `volume`: cold files on a network volume (FUSE), which needs root. `http`: a
kept home, and URIs of a server on loopback. The volume and this server send `--mb-per-s`, and the volume waits for
`--latency-ms` before each response. The original cannot read a URI, so it downloads the file and reads the copy. All
ways of a door must give the same bytes. A door whose library is not installed says so. No network is used.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.door_worker import DOORS, Door, Job
from benchmarks.load import cache
from tests.support.servers.http_server import Faults, RangeServer
from tests.support.servers.network_volume import NetworkVolume, refusal

WORKER = [sys.executable, "-m", "benchmarks.door_worker"]
STATES = ("kept", "new", "cold", "hub", "volume", "http")
TIMEOUT_S = 900.0
PARTS = ("imports_s", "first_s", "again_s")
PROCESSOR = ("imports_processor_s", "call_processor_s")
TIMES = ("total_s", "call_s", *PARTS, *PROCESSOR)
_REPOSITORIES = {"model": "model", "peft": "model", "diffusers": "diffusers"}


class Failed(Exception):
    """A process did not end in time, or ended with an error. The text is its last line."""


class Places:
    """The checkpoints below a directory, each made at its first use, and the server of those on the hub."""

    def __init__(self, root: Path, asked: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.root = root
        self.environ = os.environ | {"PENSTOCK_RUNTIME_DIR": str(root / "run"), "TOKENIZERS_PARALLELISM": "false"}
        self.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._asked = asked
        self._stack = stack
        self._made: set[str] = set()
        self._networks: dict[tuple[str, str], str] = {}
        (root / "run").mkdir(mode=0o700)

    def job(self, door: str, way: str, state: str) -> Job:
        """Return the job of one process, without the time of its start."""
        kind = DOORS[door].checkpoint
        name = kind if kind in {"dcp", "diffusers", "sentence_transformers", "manifest", "files"} else "model"
        if self._asked.small and name == "model":
            name = "small"
        self._make(name)
        if kind == "peft":
            self._make("peft")
        if kind == "held":
            self._hold(name)
        place, adapter, files = str(self.root / name), str(self.root / "adapter"), self.files(name)
        if state == "hub":
            place, adapter = f"org/{name}", "org/adapter"
        elif state in {"volume", "http"}:
            place = self._over_network(name, state)
            files = [f"{place}/{os.path.basename(path)}" for path in files]
        return Job(door, way, place, files, self._asked.device, adapter=adapter)

    def files(self, name: str) -> list[str]:
        """Return the files with weights of one checkpoint."""
        suffixes = {".safetensors", ".distcp"}
        return sorted(str(path) for path in (self.root / name).rglob("*") if path.suffix in suffixes)

    def hub(self) -> str:
        """Serve the checkpoints that were made so far; return the address."""
        command = [sys.executable, "-m", "benchmarks.bench_doors", "--serve", str(self.root)]
        server = self._background(command, {})
        assert server.stdout is not None
        return server.stdout.readline().strip()

    def _over_network(self, name: str, state: str) -> str:
        """Return where a network volume, or a server, has the files of a checkpoint."""
        if (name, state) not in self._networks:
            speed, directory = self._asked.mb_per_s * 1e6, self.root / name
            if state == "http":
                server = RangeServer(directory, faults=Faults(total_bytes_per_s=int(speed)))
                self._networks[name, state] = self._stack.enter_context(server).url
            else:
                latency_s = self._asked.latency_ms / 1e3
                volume = NetworkVolume(directory, self.root / f"{name}-volume", latency_s=latency_s, bytes_per_s=speed)
                self._networks[name, state] = str(self._stack.enter_context(volume))
        return self._networks[name, state]

    def _make(self, name: str) -> None:
        if name in self._made:
            return
        self._made.add(name)
        size = self._asked.small if name == "small" else self._asked.gib
        if name in {"dcp", "peft", "manifest"}:
            self._make("model")
        if name == "manifest":
            # A directory of hard links: the other doors must not find a manifest.
            shutil.copytree(self.root / "model", self.root / name, copy_function=os.link)
            from penstock import manifest

            manifest(str(self.root / name))
            return
        command = [*WORKER, "--make", name, str(self.root), str(size)]
        subprocess.run(command, env=self.environ, check=True, timeout=TIMEOUT_S, stdout=sys.stderr)

    def _hold(self, name: str) -> None:
        if "held" in self._made:
            return
        self._made.add("held")
        job = Job("", "", str(self.root / name), self.files(name), self._asked.device)
        holder = self._background([*WORKER, "--hold", json.dumps(job._asdict())], self.environ)
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "held":
            raise SystemExit("the weight cache did not start; see above")

    def _background(self, command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=os.environ | environ, stdin=-1, stdout=-1, text=True)
        stop = threading.Timer(4 * 3600, process.kill)
        stop.start()

        def end() -> None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stop.cancel()

        self._stack.callback(end)
        return process


def serve(root: Path) -> None:
    """Serve the checkpoints below `root` as repositories until standard input ends; print the address."""
    from tests.support.servers.hugging_face import HuggingFaceServer

    repositories = {
        f"org/{place.name}": {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
        for place in root.iterdir()
        if place.name in {"model", "adapter", "diffusers", "sentence_transformers"}
    }
    with HuggingFaceServer(repositories) as hub:
        print(hub.url, flush=True)
        sys.stdin.read()


def missing(door: Door, way: str, asked: argparse.Namespace, state: str) -> str:
    """Return why a way cannot be measured here, or an empty string."""
    absent = [name for name in door.ways[way].packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"{absent[0]} is not installed"
    if asked.device.partition(":")[0] not in door.ways[way].devices:
        return f"{way} does not load to {asked.device}"
    if asked.small and (door.checkpoint != "model" or "transformers" in door.ways[way].packages or door.engine_log):
        return "needs a model"
    if state == "hub" and importlib.util.find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed"
    if state == "volume" and refusal():
        return refusal()
    if state == "cold" and cache.file_system(asked.directory) == "tmpfs":
        return f"{asked.directory} is in memory, so no file is cold"
    return ""


def environ_of(home: str) -> dict[str, str]:
    """Return the variables of a process whose home, with the caches of all libraries, is a directory."""
    names = {
        "XDG_CACHE_HOME": ".cache",
        "XDG_CONFIG_HOME": ".config",
        "TRITON_CACHE_DIR": ".triton",
        "TORCHINDUCTOR_CACHE_DIR": ".inductor",
        "CUDA_CACHE_PATH": ".nv",
        "HF_HOME": ".hf",
    }
    return {"HOME": home} | {name: f"{home}/{folder}" for name, folder in names.items()}


def once(job: Job, places: Places, home: str, extra: dict[str, str]) -> dict[str, Any]:
    """Run one process; return its answer.

    Raises:
        Failed: with the last line that the process wrote.
    """
    door = DOORS.get(job.door)
    prefix: list[str] = []
    if door is not None and door.runs_program and job.way == "penstock":
        prefix = [sys.executable, "-m", "penstock", "run", "--"]
    environ = places.environ | environ_of(home) | extra
    command = [*prefix, *WORKER, json.dumps(job._replace(began=time.monotonic())._asdict())]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(lines[-1] if lines else f"it ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if door is None:
        return answer
    if door.engine_log:
        found = re.findall(door.engine_log, done.stdout + done.stderr)
        answer["again_s"] = float(found[-1]) if found else float("nan")
    if door.runs_program:
        answer["imports_s"] += answer["start_s"]
    answer["first_s"] = answer["call_s"] - answer["again_s"]
    answer["total_s"] = answer["imports_s"] + answer["call_s"]
    return answer


class Row(NamedTuple):
    """A door in one state."""

    door: str
    state: str
    answers: dict[str, list[dict[str, Any]]]
    """The answers of each way, in the order of the runs."""
    note: str = ""
    """Why something was not measured."""

    def record(self) -> dict[str, Any]:
        """Return the row for a file of JSON lines."""
        ways = {
            way: {
                "n": len(found),
                **{key.removesuffix("_s"): [round(answer[key], 4) for answer in found] for key in TIMES},
                "peak_mb": round(max(answer["peak_bytes"] for answer in found) / 1e6),
                "own_mb": round(max(answer["own_bytes"] for answer in found) / 1e6),
            }
            for way, found in self.answers.items()
            if found
        }
        return {"door": self.door, "state": self.state, "ways": ways, "note": self.note}


def measure(door: str, places: Places, asked: argparse.Namespace, url: str) -> Iterator[Row]:
    """Measure all states of a door, with all its ways in turns."""
    described = DOORS[door]
    states = [state for state in asked.states if state in described.states]
    homes = {way: tempfile.mkdtemp(prefix="home-", dir=places.root) for way in described.ways}
    for state in states:
        notes = {way: missing(described, way, asked, state) for way in described.ways}
        ways = [way for way in described.ways if not notes[way]]
        needed = next(iter(described.ways)), "penstock"
        if any(notes[way] for way in needed):
            yield Row(door, state, {}, next(filter(None, (notes[way] for way in needed))))
            continue
        answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        note = "; ".join(notes[way] for way in described.ways if notes[way] and "installed" not in notes[way])
        # The first run with a kept home fills its caches. It is not counted.
        for run in range(1 if state in {"new", "hub"} else 0, asked.runs + 1):
            for turn in range(len(ways)):
                way = ways[(turn + run) % len(ways)]
                job = places.job(door, way, state)
                if state in {"cold", "volume"} and (left := cache.evict(job.files)) > 0.01:
                    note = f"{left:.0%} of the files stayed in the page cache"
                extra = {}
                if state == "hub":
                    extra = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
                elif state in {"kept", "new"}:
                    cache.warm(job.files)
                with contextlib.ExitStack() as stack:
                    home = homes[way]
                    if state in {"new", "hub"}:
                        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="home-", dir=places.root))
                    try:
                        answer = once(job, places, home, extra)
                    except Failed as error:
                        note = f"{way} failed: {error}"
                        continue
                print(f"{door}, {state}, {way}: {json.dumps(answer)}", file=sys.stderr, flush=True)
                if run:
                    answers[way].append(answer)
        sums = {answer["sum"] for found in answers.values() for answer in found}
        if len(sums) > 1:
            raise SystemExit(f"{door}, {state}: the ways loaded different bytes: {sums}")
        yield Row(door, state, answers, note)


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def lines_of(row: Row) -> Iterator[str]:
    """Yield the lines of a row in the table: one for each way."""
    found = {way: answers for way, answers in row.answers.items() if answers}
    if not found:
        yield f"| {row.door} | {row.state} | {row.note or 'not measured'} {'| ' * 12}|"
        return
    # An engine's start has much besides the weights, whose time its log has.
    after = "again_s" if DOORS[row.door].engine_log else "call_s"
    reference = found.get(next(iter(DOORS[row.door].ways)), [])
    for way, answers in found.items():
        ratios = [f"{_median(answers, key) / _median(reference, key):.2f}" for key in ("total_s", after)]
        parts = [f"{_median(answers, part):.2f}" for part in (*PARTS, *PROCESSOR)]
        memory = [f"{max(answer[key] for answer in answers) / 1e6:.0f}" for key in ("peak_bytes", "own_bytes")]
        cells = [row.door, row.state, way, str(len(answers)), _cell([answer["total_s"] for answer in answers])]
        yield f"| {' | '.join([*cells, *ratios, *parts, *memory])} |"


def _median(answers: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(answer[key] for answer in answers) if answers else float("nan")


HEAD = [
    "| door | state | way | n | total, s: median (least-most) | / first way | without imports / first way | imports "
    "| first use | move | processor of imports | processor of the call | peak, MB | own, MB |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
]


def page(lines: Sequence[str], limits: Sequence[float], nbytes: int, asked: argparse.Namespace) -> str:
    """Return the results page."""
    device = asked.device
    what = "plain reads of the files into new memory" if device == "cpu" else "copies of as many pinned bytes"
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(
        [
            "# Every door, in whole new processes",
            "",
            f"`python -m benchmarks.bench_doors {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
            f"{os.cpu_count()} cores, device {device}, {nbytes / 1e9:.2f} GB on {cache.file_system(asked.directory)}. "
            f"Load average at the end: {load}.",
            "",
            f"The limit: {what} took {_cell(limits)} s, n = {len(limits)}."
            if limits
            else "The limit was not measured.",
            "",
            *HEAD,
            *lines,
            "",
        ]
    )


def main() -> int:
    """Run the rows; print the page; return 1 if a process failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Some libraries refuse a GPU without a number.
    parser.add_argument("--device", default="cpu", type=lambda name: "cuda:0" if name == "cuda" else name)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--small", type=int, default=0, help="instead of a model, so many tensors of 4 KiB in one file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--doors", default="", help="only doors whose name this regular expression finds")
    parser.add_argument("--states", nargs="*", choices=STATES, default=["kept", "new", "cold"])
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of each request to the volume")
    parser.add_argument("--mb-per-s", type=float, default=300.0, help="of the volume and of the server of URIs")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the checkpoints are written")
    parser.add_argument("--out", type=Path, help="directory for doors.md, and for doors.jsonl, which is appended to")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return 0
    lines: list[str] = []
    rows: list[Row] = []
    limits: list[float] = []
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=asked.directory)))
        places = Places(root, asked, stack)
        doors = [name for name in DOORS if re.search(asked.doors, name)]
        files = places.job("load", "penstock", "kept").files
        nbytes = sum(map(os.path.getsize, files))
        url = ""
        if "hub" in asked.states:
            for name, door in itertools.product(doors, ["hub"]):
                if "hub" in DOORS[name].states and not missing(DOORS[name], "penstock", asked, door):
                    places.job(name, "penstock", "hub")
            url = places.hub()
        for name in doors:
            cache.warm(files)
            limits.append(once(Job("limit", "", "", files, asked.device), places, str(root), {})["call_s"])
            for row in measure(name, places, asked, url):
                rows.append(row)
                lines += lines_of(row)
                print("\n".join(lines_of(row)), file=sys.stderr, flush=True)
                if asked.out:
                    asked.out.mkdir(parents=True, exist_ok=True)
                    with (asked.out / "doors.jsonl").open("a", encoding="utf-8") as file:
                        print(json.dumps({"device": asked.device, "nbytes": nbytes, **row.record()}), file=file)
        text = page(lines, limits, nbytes, asked)
    if asked.out:
        (asked.out / "doors.md").write_text(text, encoding="utf-8")
    print(text)
    return int(any(" failed: " in row.note for row in rows))


if __name__ == "__main__":
    sys.exit(main())
