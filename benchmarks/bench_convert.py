"""Conversions beside what people run today: seconds, GB/s of bytes read, peak memory; the limit measured in the run.

    python benchmarks/bench_convert.py --cpu [--source-bytes 2G] [--mergekit .../bin/mergekit-yaml] [--reps 3] [--json]
    python benchmarks/bench_convert.py --gpus 4 --source-bytes 64G [--script-bytes 16G] [--only fp8]
    python benchmarks/bench_convert.py --gpus 1 --source-bytes 16G [--only merge]

Rows: BF16 -> FP8 in blocks of 128, beside a plain script (load_file, quantise, save_file); the linear merge of three
checkpoints, beside mergekit, or the plain script where it is not given. Sources and results are on tmpfs. Every
measurement is a fresh process, from its start to its end, imports and all, and the memory is the most that it and
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
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.config import parse_bytes
from penstock.jobs.worker import LOCAL_READS
from penstock.plan.tasks import Spec, lay_out
from penstock.storage.output import OutputSet
from penstock.types import GB, MIB, DType

HIDDEN, WIDE, VOCAB = 4096, 14336, 32000
"""Of Llama 3 8B, but for its vocabulary."""
PEEK_S = 0.1
READ_BYTES = 8 * MIB

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
    """One measured case."""

    work: str
    case: str
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


def specs_of(nbytes: int) -> list[Spec]:
    """The tensors of a Llama of about so many bytes."""
    kv = HIDDEN // 4
    shapes = {
        **{f"self_attn.{name}_proj": (rows, HIDDEN) for name, rows in zip("qkv", (HIDDEN, kv, kv), strict=True)},
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        **{f"mlp.{name}_proj": (WIDE, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, WIDE),
    }

    def spec(name: str, *shape: int) -> Spec:
        return Spec(name=f"{name}.weight", dtype=DType.BF16, shape=shape)

    outer = [spec("model.embed_tokens", VOCAB, HIDDEN), spec("lm_head", VOCAB, HIDDEN), spec("model.norm", HIDDEN)]
    layer = 2 * sum(rows * columns for rows, columns in shapes.values())
    for i in range(max(1, round((nbytes - sum(one.nbytes for one in outer)) / layer))):
        at = f"model.layers.{i}"
        outer += [spec(f"{at}.{name}", *shape) for name, shape in shapes.items()]
        outer += [spec(f"{at}.{name}_layernorm", HIDDEN) for name in ("input", "post_attention")]
    return outer


def write_model(directory: Path, nbytes: int, seed: int, threads: int) -> int:
    """A checkpoint of normal numbers, with the configuration that mergekit asks for; its bytes."""
    specs = specs_of(nbytes)
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
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": sum("input_layernorm" in spec.name for spec in specs),
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
    }
    out.publish(directory, {"config.json": json.dumps(config).encode()})
    out.close()
    return int(files.table.nbytes.sum())


# -- processes


def family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for thread in _listed(f"/proc/{pid}/task"):
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def pss_bytes(pid: int) -> int:
    """Proportional set size, less what is mapped of files in tmpfs; 0 for a process that is gone."""
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in said.splitlines()[1:]}
    return fields.get("Pss", 0) - fields.get("Pss_Shmem", 0)


def run(command: Sequence[str], threads: int | None = None) -> tuple[float, float, float, str]:
    """Seconds, CPU seconds and peak memory of a fresh process and those that it starts; what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = dict(os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}))
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda pipe: said.append(pipe.read()), args=(process.stdout,))
    reader.start()
    peak, ended = 0, began
    while process.poll() is None:
        peak = max(peak, sum(pss_bytes(pid) for pid in family(process.pid)))
        time.sleep(PEEK_S)
    ended = time.monotonic()
    reader.join()
    if process.returncode:
        raise SystemExit(f"{command[:3]} ended with {process.returncode}:\n{''.join(said)[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ended - began, cpu_s, peak / 1e6, "".join(said)


def _moving_s(trace: Path | None, said: str) -> float | None:
    """See `Row.moving_s`."""
    if trace is None:
        lines = [line.split()[1] for line in said.splitlines() if line.startswith("moving ")]
        return float(lines[0]) if lines else None
    told = json.loads(trace.read_bytes())
    events = [one for one in (told["traceEvents"] if isinstance(told, dict) else told) if one.get("ph") == "X"]
    return (max(one["ts"] + one["dur"] for one in events) - min(one["ts"] for one in events)) / 1e6


def measured(
    work: str,
    case: str,
    nbytes: int,
    command: Sequence[str],
    into: Path,
    reps: int,
    threads: int | None = None,
    trace: Path | None = None,
) -> Row:
    seconds, cpu, peaks, moving = [], [], [], list[float]()
    for _ in range(reps):
        shutil.rmtree(into, ignore_errors=True)
        took, cpu_s, peak, said = run(command, threads)
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
        seconds=median,
        low=min(seconds),
        high=max(seconds),
        moving_s=statistics.median(moving) if moving else None,
        cpu_s=statistics.median(cpu),
        gb_per_s=nbytes / GB / median,
        peak_mb=max(peaks),
    )


def convert(sources: Sequence[Path], into: Path, *more: str) -> list[str]:
    program = "from penstock.cli.main import run; run()"
    return [sys.executable, "-c", program, "convert", *map(str, sources), str(into), *more]


# -- limits


def limit_gb_per_s(source: Path, scratch: Path, share: float, gpus: int) -> dict[str, float]:
    """Rates in bytes of the source a second: reading, to the devices, back, and writing `share` bytes of each byte."""
    threads = LOCAL_READS * gpus if gpus else min(LOCAL_READS, len(os.sched_getaffinity(0)))
    paths = sorted(source.glob("*.safetensors"))[:2]
    total = sum(path.stat().st_size for path in paths)
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, READ_BYTES)]
    rates = {"read": _timed(blocks, threads, lambda: _reader(), total)}
    out = scratch / "limit"
    written = int(total * share)
    with open(out, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, written)
        data = memoryview(bytes(READ_BYTES))
        offsets = range(0, written - READ_BYTES, READ_BYTES)
        rates["write"] = _timed(
            list(offsets), max(1, threads // 2), lambda: lambda at: os.pwrite(file.fileno(), data, at), written
        )
        rates["write"] /= share
    out.unlink()
    if gpus:
        rates["to device"], back = _pcie(gpus)
        rates["to host"] = back / share
    return rates


def _reader() -> Callable[[tuple[Path, int]], object]:
    buffer, fds = memoryview(bytearray(READ_BYTES)), dict[Path, int]()

    def read(block: tuple[Path, int]) -> object:
        path, at = block
        if path not in fds:
            fds[path] = os.open(path, os.O_RDONLY)
        return os.preadv(fds[path], [buffer], at)

    return read


def _timed(jobs: Sequence[object], threads: int, make: Callable[[], Callable[[object], object]], nbytes: int) -> float:
    began = time.monotonic()

    def work(index: int) -> None:
        call = make()
        for job in jobs[index::threads]:
            call(job)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return nbytes / GB / (time.monotonic() - began)


def _pcie(gpus: int) -> tuple[float, float]:
    """To and from all devices at once, both ways at the same time."""
    nbytes, times = 512 * MIB, 8
    up = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(gpus)]
    down = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(gpus)]
    there = [[torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{i}") for _ in range(2)] for i in range(gpus)]
    took = []
    for _ in range(2):
        for i in range(gpus):
            torch.cuda.synchronize(i)
        began = time.monotonic()
        for i in range(gpus):
            for stream, pair in (
                (torch.cuda.Stream(i), (there[i][0], up[i])),
                (torch.cuda.Stream(i), (down[i], there[i][1])),
            ):
                with torch.cuda.stream(stream):
                    for _ in range(times):
                        pair[0].copy_(pair[1], non_blocking=True)
        for i in range(gpus):
            torch.cuda.synchronize(i)
        took.append(time.monotonic() - began)
    rate = gpus * nbytes * times / GB / took[-1]
    return rate, rate


# -- rows


def fp8_rows(home: Path, args: argparse.Namespace, threads: int) -> Iterator[Row]:
    source, into = home / "source", home / "out"
    nbytes = write_model(source, args.source_bytes, 0, threads)
    limits = limit_gb_per_s(source, home, 0.53, args.gpus)
    slowest = min(limits, key=lambda name: limits[name])
    said = ", ".join(f"{name} {rate:.1f}" for name, rate in limits.items())
    devices = ["--devices", "all" if args.gpus else "cpu", "--workers", str(args.gpus or args.workers)]
    trace = home / "trace.json"
    more = [*devices, "--to", "fp8-block128", "--memory-bytes", args.memory, "--trace", str(trace)]
    row = measured("fp8-block128", "penstock", nbytes, convert([source], into, *more), into, args.reps, trace=trace)
    yield _beside(row, limits[slowest], f"limit: {slowest}; {said} GB/s of input")
    if args.script_bytes and args.script_bytes < nbytes:
        shutil.rmtree(source)
        nbytes = write_model(source, args.script_bytes, 0, threads)
    device = "cuda:0" if args.gpus else "cpu"
    command = [sys.executable, "-c", FP8, str(source), str(into), device]
    yield measured("fp8-block128", "torch script", nbytes, command, into, args.script_reps, args.workers)
    shutil.rmtree(source)


def merge_rows(home: Path, args: argparse.Namespace, threads: int) -> Iterator[Row]:
    sources, into = [home / f"source{i}" for i in range(3)], home / "out"
    nbytes = sum(write_model(source, args.source_bytes, i, threads) for i, source in enumerate(sources))
    limits = limit_gb_per_s(sources[0], home, 1 / 3, args.gpus)
    slowest = min(limits, key=lambda name: limits[name])
    said = ", ".join(f"{name} {rate:.1f}" for name, rate in limits.items())
    devices = ["--devices", "all" if args.gpus else "cpu", "--workers", str(args.gpus or args.workers)]
    trace = home / "trace.json"
    more = [*devices, "--op", "linear", "--memory-bytes", args.memory, "--trace", str(trace)]
    row = measured("linear merge of 3", "penstock", nbytes, convert(sources, into, *more), into, args.reps, trace=trace)
    yield _beside(row, limits[slowest], f"limit: {slowest}; {said} GB/s of input")
    if args.mergekit:
        told = {
            "merge_method": "linear",
            "dtype": "bfloat16",
            "models": [{"model": str(source), "parameters": {"weight": 1.0}} for source in sources],
        }
        recipe = home / "merge.yml"
        recipe.write_text(json.dumps(told))
        device = ["--cuda"] if args.gpus else ["--no-cuda", "-j", str(args.workers)]
        command = [args.mergekit, str(recipe), str(into), *device, "--quiet", "--no-copy-tokenizer"]
        yield measured("linear merge of 3", "mergekit", nbytes, command, into, args.script_reps)
    device_name = "cuda:0" if args.gpus else "cpu"
    command = [sys.executable, "-c", MERGE, str(into), device_name, *map(str, sources)]
    yield measured("linear merge of 3", "torch script", nbytes, command, into, args.script_reps, args.workers)


def _beside(row: Row, limit: float, says: str) -> Row:
    moving_s = row.moving_s or row.seconds
    return Row(**{**asdict(row), "of_limit": row.gb_per_s * row.seconds / moving_s / limit, "says": says})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU (so also without --gpus)")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="on the CPU")
    parser.add_argument("--source-bytes", type=parse_bytes, default=2 * GB, help="of each source")
    parser.add_argument("--script-bytes", type=parse_bytes, default=0, help="a smaller source for the plain script")
    parser.add_argument("--memory", default="256M", help="of each worker")
    parser.add_argument("--home", type=Path, default=Path("/dev/shm/penstock-bench-convert"))
    parser.add_argument("--mergekit", default="", help="path of mergekit-yaml")
    parser.add_argument("--only", choices=["fp8", "merge"])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--script-reps", type=int, default=0, help="of the others; 0: as many as --reps")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.script_reps = args.script_reps or args.reps
    threads = min(32, len(os.sched_getaffinity(0)))
    shutil.rmtree(args.home, ignore_errors=True)
    args.home.mkdir(parents=True)
    print(
        f"# {platform.processor() or platform.machine()}, torch {torch.__version__}, numpy {np.__version__}", flush=True
    )
    try:
        for work, rows in (("merge", merge_rows), ("fp8", fp8_rows)):
            if args.only in (None, work):
                for row in rows(args.home, args, threads):
                    _say(row, args.json)
                for path in args.home.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(args.home, ignore_errors=True)


def _say(row: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(row)), flush=True)
        return
    share = "" if row.of_limit is None else f"  {row.of_limit:.2f} of the limit"
    spread = f"{row.seconds:.2f} s ({row.low:.2f} - {row.high:.2f}), CPU {row.cpu_s:.1f} s"
    spread += "" if row.moving_s is None else f", moving {row.moving_s:.2f} s"
    print(
        f"{row.work:18} {row.case:14} {spread}  {row.gb_per_s:.2f} GB/s  {row.peak_mb:.0f} MB{share}  {row.says}",
        flush=True,
    )


if __name__ == "__main__":
    main()
