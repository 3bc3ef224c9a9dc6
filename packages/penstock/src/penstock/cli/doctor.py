"""`penstock doctor`: report devices, measured rates, installed engines and environment variables of this machine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.cli import terminal
from penstock.config import ecosystem, environment
from penstock.entry_points import install_hint
from penstock.report import bytes_text
from penstock.units import GB, GIB, MIB

_ECOSYSTEMS = {
    "AWS_": "object stores: S3 and compatible",
    "GOOGLE_": "object stores: Google Cloud Storage",
    "AZURE_": "object stores: Azure",
    "RUNAI_STREAMER_": "penstock_hf.runai_streamer",
}

# The copy exceeds the processor's caches, so that the rate of the memory is measured.
_COPY_BYTES = 256 * MIB
_READ_CHUNK_BYTES = 8 * MIB
_READ_S = 1.0
"""Maximum seconds for one disk measurement."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the report: a name, its value, and the reason for the value."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """A measured rate in decimal GB/s. Without a measurement the rate is None and `why` states the reason."""

    name: str
    gb_per_s: float | None
    why: str = ""


def doctor(
    path: Annotated[
        Path | None, terminal.option("--path", "FILE", "A large file on the disk whose rate to measure.")
    ] = None,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Report devices, measured limits and packages.

    The report also lists missing packages with their purpose, and the environment variables that are set.
    """
    devices, limits, engines = find_devices(), measure_limits(path), find_engines()
    variables = find_variables()
    if format is terminal.OutputFormat.json:
        variables_json = [{"name": name, "value": value, "doc": doc} for name, value, doc in variables]
        terminal.write_json({"devices": devices, "limits": limits, "engines": engines, "environment": variables_json})
        return
    terminal.write_lines("devices")
    _write_facts(devices)
    terminal.write_lines("", "limits, measured now")
    terminal.write_fields(
        {
            f"  {limit.name}": f"not measured: {limit.why}" if limit.gb_per_s is None else f"{limit.gb_per_s:.2f} GB/s"
            for limit in limits
        }
    )
    terminal.write_lines("", "engines")
    _write_facts(engines)
    terminal.write_lines("", "environment")
    terminal.write_columns(
        ["  variable", "value", "meaning"], [[f"  {n}", v or "(not set)", doc] for n, v, doc in variables]
    )


def _write_facts(facts: list[Fact]) -> None:
    terminal.write_fields({f"  {fact.name}": f"{fact.value}  {fact.why}" for fact in facts})


def find_devices() -> list[Fact]:
    """Return the CPU cores, the memory, and every CUDA device with its memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A container may use fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = [
        Fact("cpu", f"{cores} cores usable of {os.cpu_count()}"),
        Fact("memory", bytes_text(pages)),
    ]
    if not terminal.importable("torch"):
        return [*facts, Fact("cuda", "no", f"torch is not installed: {install_hint('torch')}")]
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is a CPU build" if built is None else f"torch is built for CUDA {built} and finds no device"
        return [*facts, Fact("cuda", "no", why)]
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_properties(index).name
        facts.append(Fact(f"cuda:{index}", f"{name}, {bytes_text(total)}, {bytes_text(free)} free"))
    if pairs := [(a, b) for a in range(count) for b in range(count) if a != b]:
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        facts.append(Fact("peer access", f"{peers} of {len(pairs)} ordered pairs of devices"))
    return facts


def find_engines() -> list[Fact]:
    """Return the kernel features and packages for moving or checking bytes, and whether each is available."""
    kernel = os.uname().release
    direct = "yes" if hasattr(os, "O_DIRECT") else "no"
    nowait = "yes" if hasattr(os, "RWF_NOWAIT") else "no"
    facts = [
        Fact("direct I/O", direct, "probed for each file system when a file is opened"),
        Fact("RWF_NOWAIT", nowait, f"kernel {kernel}"),
        _io_uring(),
        Fact("GPUDirect Storage", "no", "Penstock does not use it: bytes pass through pinned host memory"),
    ]
    needs = {
        "obstore": "s3:// gs:// az://",
        "torch": f"tensors; {install_hint('torch')}",
        "triton": "kernels that the wheel does not contain; part of torch's CUDA builds",
        "safetensors": "only a baseline for penstock bench",
        "nixl": f"RDMA, and GPU memory between hosts; {install_hint('nixl')}",
        "starlette": f"hosting a hub; {install_hint('hub')}",
        "gguf": f"conversion of K-quants and IQ types; {install_hint('gguf')}",
        "huggingface_hub": f"hf:// and org/name; {install_hint('hf')}",
        "redis": f"several hubs that act as one; {install_hint('redis')}",
        "ray": f"conversions on a Ray cluster; {install_hint('ray')}",
        "boto3": f"AWS profiles and SSO; {install_hint('aws')}",
        "transformers": "from_pretrained, by penstock-hf",
        "vllm": "--load-format penstock, by penstock-vllm",
        "sglang": "--load-format penstock, by penstock-sglang",
    }
    for name, what in needs.items():
        version = terminal.package_version(name)
        value = version or ("yes" if terminal.importable(name) else "not installed")
        # Show the install command only for a missing package.
        facts.append(Fact(name, value, what.partition("; pip")[0] if version else what))
    return facts


def _io_uring() -> Fact:
    from penstock.storage.io_uring import Uring, refusal

    why = refusal()
    if not why:
        try:
            Uring.open(1, 1).close()
        except OSError as error:
            why = f"the kernel refuses a ring: {error.strerror}"
    return Fact("io_uring", "no" if why else "yes", why or "fills staging for a GPU from cached files")


def find_variables() -> list[tuple[str, str | None, str]]:
    """Return Penstock's variables with their values, and the names of other ecosystems' variables that are set."""
    # The values may be credentials, so show only the names.
    others = [(name, "(set)", what) for prefix, what in _ECOSYSTEMS.items() for name in sorted(ecosystem(prefix))]
    return [*environment(), *others]


def measure_limits(path: Path | None) -> list[Limit]:
    """Measure a copy in host memory, reads of `path` if it is set, and copies from the host to every CUDA device."""
    limits = [_host_copy(), *_disk(path)]
    if not terminal.importable("torch"):
        return limits
    import torch

    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [*limits, *(_host_to_device(index) for index in devices)]


def _copy_rate(copy: Callable[[], object]) -> float:
    """Return the best rate in GB/s of three copies of `_COPY_BYTES`."""
    rates = []
    # Use the best copy, because the first copy also touches the pages, and other processes can only slow copies down.
    for _ in range(3):
        begin = time.perf_counter()
        copy()
        rates.append(_COPY_BYTES / (time.perf_counter() - begin) / GB)
    return max(rates)


def _host_copy() -> Limit:
    import numpy as np

    # Write the source's pages, because unwritten pages all map to one zero page, which stays in the CPU's cache.
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return Limit("host memory copy, one thread", _copy_rate(lambda: np.copyto(target, source)))


def _disk(path: Path | None) -> list[Limit]:
    if path is None:
        return [Limit("disk", None, "pass --path FILE with a large file on the disk")]
    return [_read(path, "buffered", 0), _read(path, "direct", getattr(os, "O_DIRECT", 0))]


def _read(path: Path, how: str, flags: int) -> Limit:
    name = f"disk read, {how}, one thread"
    if how == "direct" and not flags:
        return Limit(name, None, "this system has no direct I/O")
    try:
        file = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        return Limit(name, None, f"{path}: {error.strerror}")
    # Direct I/O requires page-aligned memory, which an anonymous mapping provides.
    buffer = memoryview(mmap.mmap(-1, _READ_CHUNK_BYTES))
    try:
        offset = 0
        begin = time.perf_counter()
        while offset < 4 * GIB and time.perf_counter() - begin < _READ_S:
            nbytes = os.preadv(file, [buffer], offset)
            offset += nbytes
            # Skip the end of the file, where a direct read would not be aligned.
            if nbytes < _READ_CHUNK_BYTES:
                break
        wall_s = time.perf_counter() - begin
    except OSError as error:
        return Limit(name, None, f"{path}: {error.strerror}")
    finally:
        os.close(file)
    if not offset:
        return Limit(name, None, f"{path} is empty")
    return Limit(name, offset / wall_s / GB)


def _host_to_device(index: int) -> Limit:
    import torch

    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")

    def copy() -> None:
        device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(index)

    return Limit(f"pinned memory to cuda:{index}", _copy_rate(copy))
