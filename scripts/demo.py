"""`make demo`: loads a realistic checkpoint with Penstock and with safetensors, and compares every bit.

It prints a table, then those for a small fleet (`demo_fleet`), a model that is served during training (`demo_sync`) and
conversions (`demo_convert`). The exit code is 1 if a bit differs, damage is not detected, the fleet reads storage more
than once, or a killed conversion does not resume.

Every measurement is a separate process, so that its peak memory belongs to that load only. Every page is touched within
the measured time, so that a mapping counts only when its bytes are there. Bits are compared afterwards (XXH3-128 of
each tensor).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

# The demo uses the tests' drivers of workers.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GB = 10**9
GIB = 1 << 30
INDEX = "model.safetensors.index.json"
STORAGE_BYTES_PER_S = 200_000_000
"""Bandwidth of the fleet's storage, which all processes share, as on a cloud volume of 200 MB/s."""
LEAST_FLEET_BYTES = 256 << 20
"""Size of the fleet's checkpoint below which the start of the processes would hide the time of storage."""
progress = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table."""

    what: str
    loader: str
    uri: str
    cold: bool = False


# --- one measurement, in a separate process --------------------------------------------------------------------------


def measure(loader: str, uri: str, device: str) -> dict[str, Any]:
    """Load once. Return seconds, bytes, peak memory above the start, path, and the digest of every tensor."""
    import torch

    load = {"penstock": prepare_penstock, "safetensors": prepare_safetensors, "download": prepare_download}[loader]()
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    reset_peak()
    before = resident_bytes("VmRSS")
    begin = time.perf_counter()
    tensors, path, verified = load(uri, device)
    touch(tensors)
    wall_s = time.perf_counter() - begin
    return {
        "wall_s": wall_s,
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "peak_bytes": max(0, resident_bytes("VmHWM") - before),
        "peak_device_bytes": 0 if device == "cpu" else torch.cuda.max_memory_allocated(),
        "path": path,
        "verified": verified,
        "digests": {name: digest(tensor) for name, tensor in tensors.items()},
    }


def prepare_penstock() -> Any:
    """Import first, load when called."""
    import penstock

    penstock_load = penstock.load

    def load(uri: str, device: str) -> tuple[dict[str, Any], str, str]:
        weights = penstock_load(uri, device=device, progress=False)
        paths = ", ".join(sorted({file.path for file in weights.report.files}))
        return (
            dict(weights),
            paths,
            "yes" if weights.report.verified else weights.report.why.partition(" at ")[0],
        )

    return load


def prepare_safetensors() -> Any:
    """Prepare the format's own reader, which reads shard by shard."""
    from safetensors.torch import load_file

    def load(uri: str, device: str) -> tuple[dict[str, Any], str, str]:
        tensors: dict[str, Any] = {}
        for file in sorted(Path(uri).glob("*.safetensors")):
            tensors |= load_file(file, device=device)
        return tensors, "mmap", "never"

    return load


def prepare_download() -> Any:
    """Prepare HTTP without Penstock: download every shard to a file, then call `load_file`."""
    load_files = prepare_safetensors()

    def load(uri: str, device: str) -> tuple[dict[str, Any], str, str]:
        base, _, name = uri.rpartition("/")
        target = Path(os.environ["DEMO_DOWNLOADS"])
        with urlopen(f"{base}/{name}") as answer:
            shards = sorted(set(json.load(answer)["weight_map"].values()))
        for shard in shards:
            with urlopen(f"{base}/{shard}") as answer, (target / shard).open("wb") as file:
                shutil.copyfileobj(answer, file, 8 << 20)
        tensors, path, verified = load_files(str(target), device)
        return tensors, f"download, {path}", verified

    return load


def touch(tensors: dict[str, Any]) -> None:
    """Read one byte from every page of host memory, and wait for the device."""
    import torch

    for tensor in tensors.values():
        if tensor.device.type == "cpu" and tensor.numel():
            int(tensor.view(-1).view(torch.uint8)[::4096].max())
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def digest(tensor: Any) -> str:
    """Return dtype, shape and a digest of the bits as text."""
    import torch
    import xxhash

    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(raw)}"


def resident_bytes(which: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(which):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Reset the peak. If the kernel refuses, it includes the imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# --- the demo --------------------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, total_bytes: int) -> list[Path]:
    """Write the checkpoint once, in BF16 and FP8 with block scales, in four shards with an index."""
    from penstock.testing.checkpoints import write_llama

    stamp = directory / "demo.json"
    facts = {"total_bytes": total_bytes, "layout": 1}
    if not (stamp.exists() and json.loads(stamp.read_text()) == facts):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        progress.print(f"writing a Llama-like checkpoint of about {total_bytes / GIB:.1f} GiB to {directory}")
        write_llama(directory, total_bytes=total_bytes, shards=4)
        stamp.write_text(json.dumps(facts))
    return sorted(directory.glob("*.safetensors"))


def drop_cached(files: list[Path]) -> None:
    """Ask the kernel to forget the pages of these files."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def run_case(case: Case, files: list[Path], device: str, downloads: Path) -> dict[str, Any]:
    """Measure a case once in a new process. Raise SystemExit if that process fails."""
    if case.cold:
        drop_cached(files)
    else:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.read(16 << 20):
                    pass
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", case.loader, case.uri, device],
            env=os.environ | {"DEMO_DOWNLOADS": str(downloads)},
            stdout=subprocess.PIPE,
            check=False,
            timeout=600,
        )
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{case.what}, {case.loader}: the measurement failed")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def penstock_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's `penstock` command."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@contextlib.contextmanager
def one_bit_flipped(file: Path) -> Iterator[None]:
    """Flip one bit in the middle of `file` while the block runs."""
    at = file.stat().st_size // 2

    def flip() -> None:
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 0x10]))

    flip()
    try:
        yield
    finally:
        flip()


def seconds_and_rate(results: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the median seconds and the GB/s as text."""
    median = statistics.median(result["wall_s"] for result in results)
    return f"{median:.2f}", f"{results[0]['nbytes'] / median / GB:.2f}"


def memory_text(results: list[dict[str, Any]]) -> str:
    """Return the largest peak of host memory, and of device memory if used."""
    host = max(result["peak_bytes"] for result in results)
    device = max(result["peak_device_bytes"] for result in results)
    return f"{host / GB:.2f} GB" + (f" + {device / GB:.2f} on the device" if device else "")


def add_rows(
    table: Table, cases: list[Case], args: argparse.Namespace, files: list[Path], truth: dict[str, str]
) -> bool:
    """Measure the cases one after another, `args.repeat` times.

    Return False if a bit differs from `truth`, filled if empty.
    """
    results: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(args.repeat):
        for case in cases:
            progress.print(f"  {case.what}: {case.loader}")
            results[case].append(run_case(case, files, args.device, Path(args.dir) / "downloads"))
    equal_everywhere = True
    for case, measured in results.items():
        if not truth:
            truth |= measured[0]["digests"]
        equal = all(result["digests"] == truth for result in measured)
        equal_everywhere &= equal
        seconds, rate = seconds_and_rate(measured)
        loader = "safetensors" if case.loader == "download" else case.loader
        bits = "reference" if loader == "safetensors" and equal else ("equal" if equal else "[red]DIFFERENT[/red]")
        how = measured[0]["path"], measured[0]["verified"]
        table.add_row(case.what, loader, seconds, rate, memory_text(measured), *how, bits)
    table.add_section()
    return equal_everywhere


def demo(args: argparse.Namespace) -> int:
    """Run everything in order. Return 0 if every bit is equal and the damage was detected."""
    from demo_fleet import fleet_demo
    from tests.support.servers.http_server import Faults, RangeServer

    from penstock.storage.weight_set import sidecar_uri

    directory = Path(args.dir) / "llama"
    files = write_checkpoint(directory, int(args.gib * GIB))
    here = str(directory)
    sidecar = Path(sidecar_uri(here).removeprefix("file://"))
    sidecar.unlink(missing_ok=True)
    nbytes = sum(file.stat().st_size for file in files)
    table = Table(
        title=f"{nbytes / GB:.2f} GB in {len(files)} shards to {args.device}, median of {args.repeat}",
        caption="time: until every page was touched; warm files on the CPU are mapped, not copied\n"
        "peak memory: growth of the process during the load",
    )
    for column in ("from", "loader", "seconds", "GB/s", "peak memory", "path", "verified", "bits"):
        table.add_column(column, justify="right" if column in {"seconds", "GB/s"} else "left", overflow="fold")
    truth: dict[str, str] = {}
    with RangeServer(directory) as server:
        index = f"{server.url}/{INDEX}"
        pairs = [
            [Case(what="disk, cold", loader=loader, uri=here, cold=True) for loader in ("safetensors", "penstock")],
            [Case(what="disk, warm", loader=loader, uri=here) for loader in ("safetensors", "penstock")],
            [Case(what="HTTP", loader=loader, uri=index) for loader in ("download", "penstock")],
        ]
        equal = True
        for cases in pairs:
            equal &= add_rows(table, cases, args, files, truth)
        written = penstock_command("manifest", here)
        if written.returncode:
            raise SystemExit(f"penstock manifest failed: {written.stderr}")
        verified = [
            Case(what="disk, warm, manifest", loader="penstock", uri=here),
            Case(what="HTTP, manifest", loader="penstock", uri=index),
        ]
        equal &= add_rows(table, verified, args, files, truth)
        # Both loaders in the second table verify, because the manifest still exists.
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    progress.print("a fleet on this host")
    # The storage sends the checkpoint to each process once, and then to the fleet, so use a smaller one.
    small = Path(args.dir) / "fleet"
    write_checkpoint(small, max(int(args.gib * GIB / 4), LEAST_FLEET_BYTES))
    with RangeServer(small, faults=Faults(total_bytes_per_s=STORAGE_BYTES_PER_S)) as server:
        equal &= fleet_demo(server, INDEX, args.device, args.workers)
    with one_bit_flipped(files[1]):
        damaged = penstock_command("load", here, "--device", args.device)
    sidecar.unlink(missing_ok=True)
    print(f"{len(truth)} tensors, every one compared with safetensors: {'EQUAL' if equal else 'DIFFERENT'}")
    print(f"one bit of {files[1].name} flipped, loaded again: exit {damaged.returncode}; {damaged.stderr.strip()}")
    return 0 if equal and damaged.returncode == 3 and "IntegrityError" in damaged.stderr else 1


def demo_of_sync(args: argparse.Namespace) -> int:
    """Train and serve a model of a sixteenth of the size. Return 0 if every bit is equal."""
    from demo_sync import sync_demo

    progress.print("a model in training, and served")
    return 0 if sync_demo(int(args.gib * GIB / 16)) else 1


def demo_of_convert(args: argparse.Namespace) -> int:
    """Convert checkpoints of an eighth of the size. Return 0 if every bit is equal."""
    from demo_convert import convert_demo

    progress.print("conversions")
    return 0 if convert_demo(int(args.gib * GIB / 8), Path(args.dir)) else 1


JOURNEYS = {"load": demo, "sync": demo_of_sync, "convert": demo_of_convert}


def main() -> int:
    """Parse arguments, then run the demo or one of its measurements."""
    parser = argparse.ArgumentParser(description="Compare Penstock with safetensors on a realistic checkpoint.")
    parser.add_argument("--only", choices=JOURNEYS, help="run only one journey; load includes the fleet")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--dir", default=".cache/demo", help="where checkpoints are written; needs 2.5 times the size")
    parser.add_argument("--repeat", type=int, default=3, help="processes per row; the median is shown")
    parser.add_argument("--workers", type=int, default=3, help="processes of the fleet that start at once")
    parser.add_argument("--device", default="", help="cpu, cuda, ...; default: CUDA where there is a GPU")
    parser.add_argument("--measure", nargs=3, metavar=("LOADER", "URI", "DEVICE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        json.dump(measure(*args.measure), sys.stdout)
        return 0
    if not args.device:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return max(run(args) for name, run in JOURNEYS.items() if args.only in {None, name})


if __name__ == "__main__":
    sys.exit(main())
