"""Sleep of level 1 of vLLM engines on a GPU: vLLM alone beside vLLM with Penstock, in one run.

    python -m benchmarks.bench_sleep_vllm --out benchmarks/results/h200x1_202611
    python -m benchmarks.bench_sleep_vllm --gb 2 --sleeps 3 --rounds 1
    python -m benchmarks.bench_sleep_vllm --render FILE.jsonl

vLLM alone has `load_format="auto"` and no plugin. Every engine is a process of its own. The two kinds take turns, and
the kind that begins changes with each round: ABBA. An engine sleeps and wakes several times. Its first sleep pins host
memory and is reported apart, since the later ones have that memory. `sleep` and `wake` are the seconds of
`llm.sleep(level=1)` and `llm.wake_up()`. `outside` is the part of them that vLLM's allocator does not take: Penstock's
digests are there.

The host's memory may grow on demand, which makes the first use of a page slow. So the limits are measured before the
engines, with more host memory than these pin, and again after them: `pin` is new pinned memory, the rest are copies by
torch. An engine whose tokens differ after a wake counts as failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "vLLM alone": ("auto", {"VLLM_PLUGINS": ""}),
    "with Penstock": ("penstock", {"VLLM_PLUGINS": "penstock"}),
}
"""Load format and environment of each kind of engine."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUIET |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
PROMPT = [1, *range(7, 300, 4)]
PIECE_BYTES = 256 << 20
"""Size of a buffer of the limits. vLLM copies its allocator's segments, of which the largest are as large."""
MARK = "RESULT "


class SleepTimes:
    """An extension of vLLM's workers: seconds of their allocator's sleeps and wakes, and what it copies."""

    def watch_sleeps(self) -> None:
        """Note the seconds of each later sleep and wake."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        self._sleep_times: dict[str, list[float]] = {"sleep": [], "wake_up": []}
        for name, seconds in self._sleep_times.items():
            setattr(allocator, name, timed(getattr(allocator, name), seconds))

    def sleep_times(self) -> Row:
        """Return the noted seconds, and the number and bytes of the segments that have weights."""
        from vllm.device_allocator import get_mem_allocator_instance

        data = get_mem_allocator_instance().pointer_to_data.values()
        sizes = [int(one.handle[1]) for one in data if one.tag == "weights"]
        return {**self._sleep_times, "segments": len(sizes), "gb": sum(sizes) / 1e9}


def timed(call: Callable[..., object], seconds: list[float]) -> Callable[..., object]:
    """Return a function that also notes the seconds of its calls."""

    def run(*arguments: object, **named: object) -> object:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    return run


def run_engine(kind: str, model: str, sleeps: int) -> Row:
    """Start an engine; let it sleep and wake; return the seconds."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=model,
        load_format=KINDS[kind][0],
        enable_sleep_mode=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=0.5,
        seed=0,
        worker_extension_cls=f"benchmarks.bench_sleep_vllm.{SleepTimes.__name__}",
    )
    start_s = time.perf_counter() - began
    few = SamplingParams(temperature=0, max_tokens=16, detokenize=False)

    def tokens() -> list[int]:
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], few, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    before = tokens()
    llm.collective_rpc("watch_sleeps")
    seconds: dict[str, list[float]] = {"sleep": [], "wake_up": []}
    for number in range(sleeps):
        timed(llm.sleep, seconds["sleep"])(level=1)
        timed(llm.wake_up, seconds["wake_up"])()
        if tokens() != before:
            raise SystemExit(f"{kind}: other tokens after wake {number + 1}")
    (inside,) = llm.collective_rpc("sleep_times")
    return {
        "kind": kind,
        "start_s": start_s,
        "sleep_s": seconds["sleep"],
        "wake_s": seconds["wake_up"],
        "sleep_inside_s": inside["sleep"],
        "wake_inside_s": inside["wake_up"],
        "segments": inside["segments"],
        "gb": inside["gb"],
        "tokens": before,
    }


def run_limits(total_gb: float) -> Row:
    """Pin as much new host memory as an engine does, and copy as much; return seconds and GB/s."""
    import torch

    device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
    pieces: list[torch.Tensor] = []
    num_pieces = max(1, round(total_gb * 1e9 / PIECE_BYTES))
    gb = num_pieces * PIECE_BYTES / 1e9
    torch.cuda.synchronize()

    def rate(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return gb / (time.perf_counter() - began)

    def pin() -> None:
        for _ in range(num_pieces):
            pieces.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    return {
        "kind": "limits",
        "gb": gb,
        "pin_gb_per_s": rate(pin),
        "d2h_gb_per_s": [rate(lambda: [piece.copy_(device) for piece in pieces]) for _ in range(4)],
        "h2d_gb_per_s": [rate(lambda: [device.copy_(piece) for piece in pieces]) for _ in range(4)],
    }


def make_model(directory: str, gb: float) -> Row:
    """Write a Llama of so many bytes that an engine can serve without a tokenizer."""
    from penstock.testing.checkpoints import write_llama

    began = time.perf_counter()
    files = write_llama(directory, total_bytes=int(gb * 1e9), fp8=False, shards=8)
    size = sum(file.stat().st_size for file in files)
    return {"kind": "model", "gb": size / 1e9, "seconds": time.perf_counter() - began}


def in_process(job: Sequence[str], environ: dict[str, str], timeout_s: float) -> Row:
    """Run a job of this module in a new process; return its row.

    Raises:
        RuntimeError: it failed or did not end in time; with its last words.
    """
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **QUIET, **environ, "PYTHONPATH": ":".join(path for path in paths if path)}
    command = [sys.executable, "-m", "benchmarks.bench_sleep_vllm", "--job", *job]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            why = f"ended with {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout_s:.0f} s"
            # With the engine's own processes, which have the GPU's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    found = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not found:
        raise RuntimeError("\n".join([*lines[-60:], f"{' '.join(job)}: {why}"]))
    row: Row = json.loads(found[-1])
    return row


def plan(rounds: int) -> list[str]:
    """Return the kinds of the engines in their order."""
    kinds = list(KINDS)
    return [kind for number in range(rounds) for kind in (kinds if number % 2 == 0 else kinds[::-1])]


def machine() -> Row:
    """Return the hardware and the versions."""
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    ).stdout.strip()  # fmt: skip
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    return {
        "kind": "machine",
        "date": time.strftime("%Y-%m-%d"),
        "GPU": gpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        **versions,
    }


def outside(row: Row, name: str) -> list[float]:
    """Return the seconds of each call that vLLM's allocator did not take; none where it was called more often."""
    whole, inside = row[f"{name}_s"], row[f"{name}_inside_s"]
    return [one - part for one, part in zip(whole, inside, strict=True)] if len(whole) == len(inside) else []


def spread(values: Iterable[float]) -> str:
    """Return the median, and the least and the greatest value."""
    found = list(values)
    if not found:
        return ""
    return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f}), n = {len(found)}"


def page(rows: Sequence[Row], command: str) -> str:
    """Return the Markdown page of a run."""
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("machine", "model", "limits", *KINDS)}
    said = "; ".join(f"{name} {value}" for name, value in by_kind["machine"][0].items() if name != "kind")
    lines = ["# Sleep of level 1: vLLM alone, and with Penstock", "", f"{said}.", "", f"    {command}", ""]
    lines += [
        f"{model['gb']:.1f} GB of a Llama in BF16, eager mode, without a tokenizer." for model in by_kind["model"]
    ]
    lines += [
        "Every engine is a process of its own, in the order ABBA. Seconds are medians with the least and the greatest",
        "value. `later` are the sleeps after the first of each engine: the first one pins host memory. `outside` is",
        "the part of a call that vLLM's allocator does not take.",
        "",
        f"| | {' | '.join(KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    columns: dict[str, Callable[[list[Row]], str]] = {
        "first sleep": lambda some: spread(row["sleep_s"][0] for row in some),
        "first sleep, outside": lambda some: spread(s for row in some for s in outside(row, "sleep")[:1]),
        "later sleep": lambda some: spread(s for row in some for s in row["sleep_s"][1:]),
        "later sleep, outside": lambda some: spread(s for row in some for s in outside(row, "sleep")[1:]),
        "wake": lambda some: spread(s for row in some for s in row["wake_s"]),
        "wake, outside": lambda some: spread(s for row in some for s in outside(row, "wake")),
        "engine start": lambda some: spread(row["start_s"] for row in some),
        "GB copied, segments": lambda some: ", ".join(
            sorted({f"{row['gb']:.2f} in {row['segments']}" for row in some})
        ),
        "first sleeps in order": lambda some: ", ".join(f"{row['sleep_s'][0]:.2f}" for row in some),
    }
    for name, column in columns.items():
        lines.append(f"| {name} | {' | '.join(column(by_kind[kind]) for kind in KINDS)} |")
    alone, ours = (by_kind[kind] for kind in KINDS)
    if alone and ours:
        ratios = {
            "first sleep": [statistics.median(row["sleep_s"][0] for row in some) for some in (ours, alone)],
            "later sleep": [statistics.median(s for row in some for s in row["sleep_s"][1:]) for some in (ours, alone)],
            "wake": [statistics.median(s for row in some for s in row["wake_s"]) for some in (ours, alone)],
        }
        said = "; ".join(f"{name} {ours_s / alone_s:.3f}" for name, (ours_s, alone_s) in ratios.items())
        lines += ["", f"With Penstock / vLLM alone, medians: {said}."]
    lines += ["", "Limits, before the engines and after them:", ""]
    lines += ["| GB | pin, GB/s | device to pinned host, GB/s | pinned host to device, GB/s |", "|---|---|---|---|"]
    for row in by_kind["limits"]:
        copies = f"{spread(row['d2h_gb_per_s'])} | {spread(row['h2d_gb_per_s'])}"
        lines.append(f"| {row['gb']:.1f} | {row['pin_gb_per_s']:.2f} | {copies} |")
    failed = [row for row in rows if row["kind"] == "failed"]
    lines += ["", *(f"Failed: {row['engine']}: {row['why'].splitlines()[-1]}" for row in failed)] if failed else []
    return "\n".join(lines) + "\n"


def measure(asked: argparse.Namespace, add: Callable[[Row], None]) -> None:
    """Run all jobs; give each row to a function as soon as it is there."""
    add(machine())
    directory = Path(tempfile.mkdtemp(prefix="sleep-", dir=asked.directory))
    try:
        model = in_process(["model", str(directory), str(asked.gb)], {}, asked.timeout_s)
        add(model)
        # The allocator of pinned memory rounds up to powers of two.
        limits = ["limits", str(1.5 * model["gb"])]
        add(in_process(limits, {}, asked.timeout_s))
        for kind in plan(asked.rounds):
            job = ["engine", kind, str(directory), str(asked.sleeps)]
            try:
                add(in_process(job, KINDS[kind][1], asked.timeout_s))
            except RuntimeError as error:
                # The others are of use all the same.
                add({"kind": "failed", "engine": kind, "why": str(error)})
        add(in_process(limits, {}, asked.timeout_s))
    finally:
        shutil.rmtree(directory)


def run_job(job: Sequence[str]) -> Row:
    """Run what a process was started for."""
    match list(job):
        case ["model", directory, gb]:
            return make_model(directory, float(gb))
        case ["limits", gb]:
            return run_limits(float(gb))
        case ["engine", kind, model, sleeps]:
            return run_engine(kind, model, int(sleeps))
    raise SystemExit(f"unknown job: {job}")


def main() -> None:
    """Measure, print the page, and write it with its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--sleeps", type=int, default=5, help="of each engine, two at least")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each kind")
    parser.add_argument("--directory", default="/dev/shm", help="where the model is written")
    parser.add_argument("--out", type=Path, help="directory of the page and its rows")
    parser.add_argument("--name", default="sleep-vllm", help="of the page")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each process")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--render", type=Path, help="print the page of rows that were written before")
    asked = parser.parse_args()
    if asked.job:
        print(f"{MARK}{json.dumps(run_job(asked.job))}", flush=True)
        return
    command = f"python -m benchmarks.bench_sleep_vllm --gb {asked.gb:g} --sleeps {asked.sleeps} --rounds {asked.rounds}"
    rows: list[Row] = []
    if asked.render:
        rows += map(json.loads, asked.render.read_text().splitlines())
        print(page(rows, command), end="")
        return
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    lines = (asked.out / f"{asked.name}.jsonl").open("w") if asked.out else None

    def add(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if lines is not None:
            # At once: a run that is ended at its limit keeps the rows that it has.
            print(json.dumps(row), file=lines, flush=True)

    measure(asked, add)
    text = page(rows, command)
    print(text, end="")
    if asked.out:
        (asked.out / f"{asked.name}.md").write_text(text)
    if any(row["kind"] == "failed" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
