"""The fourth table of `make demo`: compares conversions by Penstock with a plain torch script.

It checks that every bit equals the script's, that a killed run resumes, and that the result is verified. Each
measurement is a separate process, whose time begins after its imports. Penstock's time includes the start of its
workers, which import torch themselves.

    python scripts/demo_convert.py --mib 64
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

GB, MIB = 10**9, 1 << 20
BLOCK, E4M3_MAX = 128, 448.0
WORKERS = 2
progress = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversion: the arguments of `penstock.convert`, and the function of the plain script."""

    what: str
    sources: tuple[str, ...]
    plain: str
    words: dict[str, Any]


# --- the plain script: load_file, compute, save_file, shard after shard ----------------------------------------------


def quantised(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise to E4M3 in blocks of 128 x 128 with one scale each, as in DeepSeek-V3.

    Norms, embedding and head stay.
    """
    import torch

    (source,) = tensors
    if source.ndim != 2 or "embed" in name or "lm_head" in name:
        return {name: source}
    rows, columns = source.shape
    padded = torch.nn.functional.pad(source.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=2.0**-100) / E4M3_MAX
    scaled = blocks * scales.reciprocal()[:, None, :, None]
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def averaged(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean, computed in FP32."""
    first, second = tensors
    return {name: ((first.float() + second.float()) / 2).to(first.dtype)}


def plain(function: str, sources: Sequence[str], into: str) -> dict[str, Any]:
    """Run the script on all shards."""
    from safetensors.torch import load_file, save_file

    convert: Callable[[str, Sequence[torch.Tensor]], dict[str, torch.Tensor]] = globals()[function]
    from demo import reset_peak

    reset_peak()
    before, begun = memory("VmRSS"), time.perf_counter()
    Path(into).mkdir()
    for shard in sorted(Path(sources[0]).glob("*.safetensors")):
        loaded = [load_file(Path(source, shard.name)) for source in sources]
        made: dict[str, torch.Tensor] = {}
        for name in loaded[0]:
            made |= {key: one.contiguous() for key, one in convert(name, [one[name] for one in loaded]).items()}
        save_file(made, Path(into, shard.name), {"format": "pt"})
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "peak_bytes": memory("VmHWM") - before, "num_resumed": 0}


def memory(which: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


# --- Penstock --------------------------------------------------------------------------------------------------------


def penstock(words: dict[str, Any], sources: Sequence[str], into: str, killed: bool) -> dict[str, Any]:
    """Run the conversion. With `killed`, this process ends by SIGKILL when half of the tasks are done."""
    import torch  # noqa: F401  (it is in nobody's time)

    import penstock as ps
    import penstock_convert

    def end(num_done: int, total: int) -> None:
        if killed and 2 * num_done >= total:
            os.kill(os.getpid(), signal.SIGKILL)

    begun = time.perf_counter()
    workers = penstock_convert.WorkerSettings(num_workers=WORKERS, task_bytes="4M")
    report = ps.convert(list(sources), into, devices="cpu", workers=workers, progress=end, **words)
    return {
        "seconds": time.perf_counter() - begun,
        "peak_bytes": sum(one.peak_bytes for one in report.workers),
        "num_tasks": report.num_tasks,
        "num_resumed": report.num_resumed,
        "is_verified": ps.verify(into).verified,
    }


# --- the demo --------------------------------------------------------------------------------------------------------


def measure(**words: Any) -> dict[str, Any]:
    """Make one measurement in a separate process. Return {} if it was killed."""
    command = [sys.executable, __file__, "--measure", json.dumps(words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=600)
    if done.returncode == -signal.SIGKILL and words.get("killed"):
        return {}
    if done.returncode:
        raise SystemExit(f"{words}: the measurement failed")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bits(directory: str) -> dict[str, str]:
    """Return the dtype, shape and digest of every tensor, read by the format's own reader."""
    import torch
    import xxhash
    from safetensors.torch import load_file

    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        for name, one in load_file(file).items():
            raw = one.contiguous().view(-1).view(torch.uint8).numpy()
            found[name] = f"{one.dtype} {tuple(one.shape)} {xxhash.xxh3_128_hexdigest(raw.data)}"
    return found


def run_case(case: Case, directory: Path, table: Table, *, killed: bool) -> bool:
    """Run the script, then Penstock. Return whether all results are right."""
    true, made = str(directory / "plain"), str(directory / "made")
    progress.print(f"  {case.what}: the plain script")
    script = measure(plain=case.plain, sources=case.sources, into=true)
    if killed:
        progress.print(f"  {case.what}: penstock, killed")
        if measure(words=case.words, sources=case.sources, into=made, killed=True) or Path(made).exists():
            return False
    progress.print(f"  {case.what}: penstock")
    ours = measure(words=case.words, sources=case.sources, into=made, killed=False)
    is_equal = bits(made) == bits(true)
    went_on = 0 < ours["num_resumed"] < ours["num_tasks"] if killed else not ours["num_resumed"]
    table.add_row(case.what, "plain torch", f"{script['seconds']:.2f}", memory_text(script), "-", "never", "reference")
    table.add_row(
        "",
        "penstock, killed and run again" if killed else "penstock",
        f"{ours['seconds']:.2f}",
        memory_text(ours),
        f"{ours['num_resumed']} of {ours['num_tasks']}",
        "yes" if ours["is_verified"] else "[red]NO[/red]",
        "equal" if is_equal else "[red]DIFFERENT[/red]",
    )
    table.add_section()
    for one in (true, made):
        shutil.rmtree(one)
    return is_equal and went_on and bool(ours["is_verified"])


def memory_text(result: dict[str, Any]) -> str:
    """Return the peak memory as text."""
    return f"{result['peak_bytes'] / GB:.3f} GB"


def convert_demo(nbytes: int, directory: Path) -> bool:
    """Print the table for checkpoints of about `nbytes` bytes.

    Return False if a bit differs or a run did not resume.
    """
    from penstock.testing.checkpoints import write_llama

    begun = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        here, sources = Path(place), []
        for seed in range(2):
            sources.append(str(here / f"llama-{seed}"))
            write_llama(sources[seed], total_bytes=nbytes, fp8=False, shards=2, seed=seed)
        cases = [
            Case(
                what="BF16 to fp8-block128",
                sources=(sources[0],),
                plain="quantised",
                words={"to": "fp8-block128"},
            ),
            Case(
                what="average of two",
                sources=tuple(sources),
                plain="averaged",
                words={"operations": [{"op": "average"}]},
            ),
        ]
        size = sum(file.stat().st_size for file in Path(sources[0]).glob("*.safetensors"))
        table = Table(
            title=f"checkpoints of {size / GB:.3f} GB, converted by {WORKERS} workers on CPU cores",
            caption="time: without imports, except in Penstock's workers, and without the killed run\n"
            "peak memory: growth of the script's process; sum over the tasks of all workers",
        )
        for column in ("conversion", "by", "seconds", "peak memory", "tasks kept", "verified", "bits"):
            table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
        equal = [run_case(case, here, table, killed=case is cases[0]) for case in cases]
    Console(width=None if Console().is_terminal else 120).print(table)
    progress.print(f"  {time.monotonic() - begun:.0f} s in total")
    return all(equal)


def main() -> int:
    """Run the demo, or one of its measurements."""
    parser = argparse.ArgumentParser(description="Compare conversions by Penstock with a plain torch script.")
    parser.add_argument("--mib", type=float, default=64.0, help="size of each checkpoint")
    parser.add_argument("--dir", default=".cache/demo", help="where they are written; needs five times the size")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        words = json.loads(args.measure)
        if "plain" in words:
            json.dump(plain(words["plain"], words["sources"], words["into"]), sys.stdout)
        else:
            json.dump(penstock(**words), sys.stdout)
        return 0
    return 0 if convert_demo(int(args.mib * MIB), Path(args.dir)) else 1


if __name__ == "__main__":
    sys.exit(main())
