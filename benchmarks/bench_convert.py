"""Conversions beside programs of today: seconds, GB/s of bytes read, peak memory; the limit measured in the run.

    python -m benchmarks.bench_convert [--source-bytes 2G] [--mergekit .../bin/mergekit-yaml] [--reps 3]
    python -m benchmarks.bench_convert --gpus 4 --source-bytes 64G --script-bytes 16G --only fp8 --memory 2G --reps 1
    python -m benchmarks.bench_convert --gpus 1 --source-bytes 16G --only merge --memory 4G --budget-s 240
    python -m benchmarks.bench_convert --only copy --source-bytes 4G --home /var/tmp/bench          on a disk
    python -m benchmarks.bench_convert --hidden 512 --source-bytes 100M --reps 1          a minute, to see that it works

Rows: BF16 -> FP8 in blocks of 128, beside a plain script (load_file, quantise, save_file); the linear merge of three
checkpoints, beside mergekit, or the plain script where it is not given; a copy, beside cp. Each row is printed, and
with `--out` written, when it is there; one that fails, or for which `--budget-s` leaves no time, says so. Sources and
results are on tmpfs, or in `--home`.
Every measurement is a fresh process, from its start to its end, imports and all, and the memory is the most that it and
those it started had at once: the sum of their proportional set sizes (smaps_rollup), looked at ten times a second.
The files in tmpfs are not in it: nobody maps them but the plain script.

Limit: the slowest of reading the input, copying it to the devices, copying the result back, writing it: each by as
many threads as the workers have, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.convert_limits import limit_gb_per_s
from benchmarks.processes import Failed, run

from penstock.config import parse_bytes
from penstock.errors import PenstockError
from penstock.storage.output import OutputSet
from penstock.types import GB, MIB, DType
from penstock_convert.plan.tasks import Spec, lay_out

WIDER, VOCAB = 3.5, 32000
"""Of Llama 3 8B, but for its vocabulary; so is the hidden size unless the command says otherwise."""

FP8 = """
import sys, time, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
device = sys.argv[3]
torch.zeros(1, device=device)
began = time.monotonic()
into = Path(sys.argv[2]); into.mkdir()
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    found = {}
    for name, w in load_file(path).items():
        if w.ndim != 2 or "embed" in name or "lm_head" in name:
            found[name] = w
            continue
        w = w.to(device).float()
        blocks = w.view(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
        found[name] = (blocks / scale).to(torch.float8_e4m3fn).view(w.shape).cpu()
        found[name + "_scale_inv"] = scale.view(blocks.shape[0], blocks.shape[2]).cpu()
    save_file(found, into / path.name)
print("moving", time.monotonic() - began)
"""
LLMCOMPRESSOR = """
import sys, time, torch
from llmcompressor import model_free_ptq
source, into, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or "cpu"
began = time.monotonic()
model_free_ptq(source, into, scheme="FP8_BLOCK", ignore=["lm_head"], max_workers=num_workers, device=devices)
print("moving", time.monotonic() - began)
"""
MERGE = """
import sys, time, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
device, into = sys.argv[2], Path(sys.argv[1])
torch.zeros(1, device=device)
began = time.monotonic()
into.mkdir()
sources = sys.argv[3:]
for path in sorted(Path(sources[0]).glob("*.safetensors")):
    parts = [load_file(Path(source) / path.name) for source in sources]
    found = {}
    for name, w in parts[0].items():
        total = sum(part[name].to(device).float() for part in parts) / len(parts)
        found[name] = total.to(w.dtype).cpu()
    save_file(found, into / path.name)
print("moving", time.monotonic() - began)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured case."""

    work: str
    case: str
    num: int
    seconds: float
    low: float
    high: float
    moving_s: float | None
    """Of these, from the first byte read to the last written: without imports, devices waking, kernels compiled. Of the
    trace, or as the script said; None where nothing says it."""
    cpu_s: float
    """Of all processes: what other work on the machine changes least."""
    gb_per_s: float
    """Of bytes read."""
    peak_mb: float
    of_limit: float | None = None
    """While it moves."""
    says: str = ""


def specs_of(nbytes: int, hidden: int) -> list[Spec]:
    """Return the tensors of a Llama of about `nbytes` bytes."""
    kv, wide, vocab = hidden // 4, int(WIDER * hidden), min(VOCAB, 8 * hidden)
    shapes = {
        **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in zip("qkv", (hidden, kv, kv), strict=True)},
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, wide),
    }

    def spec(name: str, *shape: int) -> Spec:
        return Spec(name=f"{name}.weight", dtype=DType.BF16, shape=shape)

    outer = [spec("model.embed_tokens", vocab, hidden), spec("lm_head", vocab, hidden), spec("model.norm", hidden)]
    layer = 2 * sum(rows * columns for rows, columns in shapes.values())
    for i in range(max(1, round((nbytes - sum(one.nbytes for one in outer)) / layer))):
        at = f"model.layers.{i}"
        outer += [spec(f"{at}.{name}", *shape) for name, shape in shapes.items()]
        outer += [spec(f"{at}.{name}_layernorm", hidden) for name in ("input", "post_attention")]
    return outer


def write_model(directory: Path, nbytes: int, seed: int, threads: int, hidden: int) -> int:
    """A checkpoint of normal numbers, with the configuration that mergekit asks for; its bytes."""
    specs = specs_of(nbytes, hidden)
    files = lay_out(specs, shard_bytes=4 * GB)
    chance = torch.Generator().manual_seed(seed)
    tile = torch.randn(8 * MIB, generator=chance).mul_(0.02).bfloat16().view(torch.uint8).numpy()
    growing = directory.with_name(f".{directory.name}")
    out = OutputSet(growing, files.table, files.body_nbytes, {"format": "pt"})
    out.create()
    out.open()

    def fill(piece: tuple[int, int, int]) -> None:
        file, start, stop = piece
        out.write(file, start, tile[: stop - start].data)

    pieces = [
        (file, at, min(at + len(tile), body))
        for file, body in enumerate(files.body_nbytes)
        for at in range(0, body, len(tile))
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, pieces))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(WIDER * hidden),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "num_hidden_layers": sum("input_layernorm" in spec.name for spec in specs),
        "vocab_size": min(VOCAB, 8 * hidden),
        "torch_dtype": "bfloat16",
    }
    out.publish(directory, {"config.json": json.dumps(config).encode()})
    out.close()
    return int(files.table.nbytes.sum())


def convert(sources: Sequence[Path], into: Path, *more: str) -> list[str]:
    program = "from penstock.cli.main import run; run()"
    return [sys.executable, "-c", program, "convert", *map(str, sources), str(into), *more]


def _moving_s(trace: Path | None, said: str) -> float | None:
    """See `Row.moving_s`."""
    if trace is None:
        lines = [line.split()[1] for line in said.splitlines() if line.startswith("moving ")]
        return float(lines[0]) if lines else None
    told = json.loads(trace.read_bytes())
    events = [one for one in (told["traceEvents"] if isinstance(told, dict) else told) if one.get("ph") == "X"]
    return (max(one["ts"] + one["dur"] for one in events) - min(one["ts"] for one in events)) / 1e6


# -- rows


class Bench:
    """A run of the program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began, self.num_failed = args, time.monotonic(), 0
        self.home: Path = args.home
        self.threads = min(32, len(os.sched_getaffinity(0)))
        self.device = "cuda:0" if args.gpus else "cpu"
        self.workers = ["--workers", str(args.gpus or args.workers)]

    def left_s(self) -> float:
        return float(self.args.budget_s) - (time.monotonic() - self.began)

    def attempt(self, work: str, case: str, measure: Callable[[], Row]) -> None:
        """A row; or why there is none."""
        try:
            if self.left_s() < 1:
                raise Failed("no time left")
            row = measure()
        except (Failed, PenstockError, OSError, RuntimeError) as error:
            self.num_failed += 1
            self.say({"work": work, "case": case, "failed": str(error)}, f"not measured: {error}")
            return
        self.say(asdict(row), _told(row))

    def say(self, row: dict[str, object], text: str) -> None:
        print(json.dumps(row) if self.args.json else f"{row['work']:18} {row['case']:14} {text}", flush=True)
        if self.args.out is not None:
            self.args.out.mkdir(parents=True, exist_ok=True)
            with (self.args.out / "convert.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({**row, "load": os.getloadavg()[0], "arguments": sys.argv[1:]}) + "\n")

    def source(self, name: str, nbytes: int, seed: int = 0) -> tuple[Path, int]:
        """A checkpoint on tmpfs, and its bytes."""
        return self.home / name, write_model(self.home / name, nbytes, seed, self.threads, self.args.hidden)

    def ours(self, work: str, sources: Sequence[Path], nbytes: int, share: float, *more: str) -> Row:
        """`penstock convert`, beside the slowest of what it cannot do without: the best of before and after, for memory
        that a machine of others has not touched before is slow at first."""
        before = limit_gb_per_s(sources[0], self.home, share, self.args.gpus)
        trace, into = self.home / "trace.json", self.home / "out"
        devices = ["--devices", "all" if self.args.gpus else "cpu"]
        command = convert(sources, into, *devices, *more, "--memory-bytes", self.args.memory, "--trace", str(trace))
        row = self.measured(work, "penstock", nbytes, command, self.args.reps, trace=trace)
        after = limit_gb_per_s(sources[0], self.home, share, self.args.gpus)
        limits = {name: max(rate, after[name]) for name, rate in before.items()}
        slowest = min(limits, key=lambda name: limits[name])
        said = ", ".join(f"{name} {rate:.1f}" for name, rate in limits.items())
        of_limit = row.gb_per_s * row.seconds / (row.moving_s or row.seconds) / limits[slowest]
        return replace(row, of_limit=of_limit, says=f"limit: {slowest}; {said} GB/s of input")

    def script(self, work: str, nbytes: int, program: str, *arguments: object) -> Row:
        """The plain script, on as many threads as there are workers."""
        command = [sys.executable, "-c", program, *map(str, arguments)]
        environ = {"OMP_NUM_THREADS": str(self.args.workers)}
        return self.measured(work, "torch script", nbytes, command, self.args.script_reps, environ=environ)

    def measured(
        self,
        work: str,
        case: str,
        nbytes: int,
        command: Sequence[str],
        reps: int,
        *,
        environ: Mapping[str, str] | None = None,
        trace: Path | None = None,
    ) -> Row:
        """Medians of as many runs as the time allows; the peak of the worst."""
        into, moving = self.home / "out", list[float]()
        seconds, cpu, peaks = [], [], []
        while len(seconds) < reps and (not seconds or self.left_s() > 1.5 * max(seconds)):
            shutil.rmtree(into, ignore_errors=True)
            took, cpu_s, peak, said = run(command, environ=environ, timeout_s=max(1.0, self.left_s()))
            if (moved_s := _moving_s(trace, said)) is not None:
                moving.append(moved_s)
            seconds.append(took)
            cpu.append(cpu_s)
            peaks.append(peak)
        shutil.rmtree(into, ignore_errors=True)
        median = statistics.median(seconds)
        return Row(
            work=work,
            case=case,
            num=len(seconds),
            seconds=median,
            low=min(seconds),
            high=max(seconds),
            moving_s=statistics.median(moving) if moving else None,
            cpu_s=statistics.median(cpu),
            gb_per_s=nbytes / GB / median,
            peak_mb=max(peaks),
        )


def fp8_rows(bench: Bench) -> None:
    args, work = bench.args, "fp8-block128"
    source, nbytes = bench.source("source", args.source_bytes)
    bench.attempt(
        work, "penstock", lambda: bench.ours(work, [source], nbytes, 0.53, *bench.workers, "--to", "fp8-block128")
    )
    if args.script_bytes and args.script_bytes < nbytes:
        shutil.rmtree(source)
        source, nbytes = bench.source("source", args.script_bytes)
    bench.attempt(
        work, "torch script", lambda: bench.script(work, nbytes, FP8, source, bench.home / "out", bench.device)
    )
    if args.llmcompressor:
        command = [args.llmcompressor, "-c", LLMCOMPRESSOR, str(source), str(bench.home / "out"), str(args.workers)]
        bench.attempt(
            work, "llmcompressor", lambda: bench.measured(work, "llmcompressor", nbytes, command, args.script_reps)
        )


def merge_rows(bench: Bench) -> None:
    args, work, into = bench.args, "linear merge of 3", bench.home / "out"
    made = [bench.source(f"source{i}", args.source_bytes, i) for i in range(3)]
    sources, nbytes = [source for source, _ in made], sum(size for _, size in made)
    bench.attempt(work, "penstock", lambda: bench.ours(work, sources, nbytes, 1 / 3, *bench.workers, "--op", "linear"))
    if args.mergekit:
        told = {
            "merge_method": "linear",
            "dtype": "bfloat16",
            "models": [{"model": str(source), "parameters": {"weight": 1.0}} for source in sources],
        }
        recipe = bench.home / "merge.yml"
        recipe.write_text(json.dumps(told))
        device = ["--cuda"] if args.gpus else ["--no-cuda", "-j", str(args.workers)]
        command = [args.mergekit, str(recipe), str(into), *device, "--quiet", "--no-copy-tokenizer"]
        bench.attempt(work, "mergekit", lambda: bench.measured(work, "mergekit", nbytes, command, args.script_reps))
    bench.attempt(work, "torch script", lambda: bench.script(work, nbytes, MERGE, into, bench.device, *sources))


def copy_rows(bench: Bench) -> None:
    """Rows of a copy beside cp, which digests nothing, and beside cp and a sync of the file system."""
    args, work, into = bench.args, "copy", bench.home / "out"
    source, nbytes = bench.source("source", args.source_bytes)
    bench.attempt(work, "penstock", lambda: bench.ours(work, [source], nbytes, 1.0))
    for case, program in (("cp", 'cp -r "$0" "$1"'), ("cp, synced", 'cp -r "$0" "$1" && sync -f "$1"')):
        command = ["sh", "-c", program, str(source), str(into)]
        bench.attempt(work, case, partial(bench.measured, work, case, nbytes, command, args.script_reps))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    parser.add_argument("--workers", type=int, default=2, help="on the CPU")
    parser.add_argument("--source-bytes", type=parse_bytes, default=2 * GB, help="of each source")
    parser.add_argument("--script-bytes", type=parse_bytes, default=0, help="a smaller source for the plain script")
    parser.add_argument("--hidden", type=int, default=4096, help="of the model, a multiple of 512")
    parser.add_argument("--memory", default="256M", help="of each worker")
    parser.add_argument("--home", type=Path, default=Path("/dev/shm/penstock-bench-convert"))
    parser.add_argument("--mergekit", default="", help="path of mergekit-yaml")
    parser.add_argument("--llmcompressor", default="", help="path of a Python that has llmcompressor")
    parser.add_argument("--only", choices=["fp8", "merge", "copy"])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--script-reps", type=int, default=0, help="of the others; 0: as many as --reps")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="in all; rows that do not fit are left out"
    )
    parser.add_argument("--out", type=Path, help="a directory whose convert.jsonl the rows are added to")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.script_reps = args.script_reps or args.reps
    shutil.rmtree(args.home, ignore_errors=True)
    args.home.mkdir(parents=True)
    bench = Bench(args)
    print(f"# {platform.machine()}, torch {torch.__version__}, numpy {np.__version__}", file=sys.stderr, flush=True)
    try:
        for work, rows in (("merge", merge_rows), ("fp8", fp8_rows), ("copy", copy_rows)):
            if args.only in (None, work):
                rows(bench)
                for path in args.home.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(args.home, ignore_errors=True)
    return 1 if bench.num_failed else 0


def _told(row: Row) -> str:
    share = "" if row.of_limit is None else f"  {row.of_limit:.2f} of the limit"
    spread = f"{row.seconds:.2f} s ({row.low:.2f} - {row.high:.2f}, n = {row.num}), CPU {row.cpu_s:.1f} s"
    spread += "" if row.moving_s is None else f", moving {row.moving_s:.2f} s"
    return f"{spread}  {row.gb_per_s:.2f} GB/s  {row.peak_mb:.0f} MB{share}  {row.says}"


if __name__ == "__main__":
    sys.exit(main())
