"""`penstock doctor`: report devices, measured rates, installed engines and environment variables on this machine.

Each measurement takes at most about a second.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.cli.terminal import (
    FormatOption,
    OutputFormat,
    importable,
    option,
    package_version,
    write_columns,
    write_fields,
    write_json,
    write_lines,
)
from penstock.config import ecosystem, environment
from penstock.entry_points import install_hint
from penstock.report import bytes_text
from penstock.storage.io_uring import Uring, refusal
from penstock.types import GB, GIB, MIB

_ECOSYSTEMS = {
    "AWS_": "object stores: S3 and compatible",
    "GOOGLE_": "object stores: Google Cloud Storage",
    "AZURE_": "object stores: Azure",
    "RUNAI_STREAMER_": "penstock_hf.runai_streamer",
}

# Larger than the processor's caches, so that the rate is the memory's.
_COPY_BYTES = 256 * MIB
_READ_CHUNK_BYTES = 8 * MIB
_READ_S = 1.0
"""Maximum seconds for one disk measurement. A second gives the disk's rate, and the command has to be quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A line of the report: a name, its value, and the reason for the value."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A measured rate in decimal GB/s. If it was not measured, the rate is None and `why` gives the reason."""

    name: str
    gb_per_s: float | None
    why: str = ""


def doctor(
    path: Annotated[Path | None, option("--path", "FILE", "A large file on the disk whose rate to measure.")] = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Report devices, measured limits and packages.

    The report also has missing packages with their purpose, and the environment variables that are set.
    """
    devices, limits, engines = find_devices(), measure_limits(path), find_engines()
    variables = find_variables()
    if format is OutputFormat.json:
        variables_json = [{"name": name, "value": value, "doc": doc} for name, value, doc in variables]
        write_json({"devices": devices, "limits": limits, "engines": engines, "environment": variables_json})
        return
    write_lines("devices")
    write_fields({f"  {fact.name}": f"{fact.value}  {fact.why}" for fact in devices})
    write_lines("", "limits, measured now")
    write_fields(
        {
            f"  {limit.name}": f"not measured: {limit.why}" if limit.gb_per_s is None else f"{limit.gb_per_s:.2f} GB/s"
            for limit in limits
        }
    )
    write_lines("", "engines")
    write_fields({f"  {fact.name}": f"{fact.value}  {fact.why}" for fact in engines})
    write_lines("", "environment")
    write_columns(["  variable", "value", "meaning"], [[f"  {n}", v or "(not set)", doc] for n, v, doc in variables])


def find_devices() -> list[Fact]:
    """Return the CPU cores, the memory, and every CUDA device with its memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A container may use fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = [
        Fact(name="cpu", value=f"{cores} cores usable of {os.cpu_count()}"),
        Fact(name="memory", value=bytes_text(pages)),
    ]
    if not importable("torch"):
        return [*facts, Fact(name="cuda", value="no", why=f"torch is not installed: {install_hint('torch')}")]
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is a CPU build" if built is None else f"torch is built for CUDA {built} and finds no device"
        return [*facts, Fact(name="cuda", value="no", why=why)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        value = f"{properties.name}, {bytes_text(total)}, {bytes_text(free)} free"
        facts.append(Fact(name=f"cuda:{index}", value=value))
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if pairs:
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        facts.append(Fact(name="peer access", value=f"{peers} of {len(pairs)} ordered pairs of devices"))
    return facts


def find_engines() -> list[Fact]:
    """Return the kernel features and packages that move or check bytes, and whether they are available."""
    kernel = os.uname().release
    direct = "yes" if hasattr(os, "O_DIRECT") else "no"
    nowait = "yes" if hasattr(os, "RWF_NOWAIT") else "no"
    facts = [
        Fact(name="direct I/O", value=direct, why="probed for each file system when a file is opened"),
        Fact(name="RWF_NOWAIT", value=nowait, why=f"kernel {kernel}"),
        _io_uring(),
        Fact(
            name="GPUDirect Storage", value="no", why="Penstock does not use it: bytes pass through pinned host memory"
        ),
    ]
    needs = {
        "obstore": ("obstore", "s3:// gs:// az://"),
        "torch": ("torch", f"tensors; {install_hint('torch')}"),
        "triton": ("triton", "digests on the device; part of torch's CUDA builds"),
        "safetensors": ("safetensors", "only a baseline for penstock bench"),
        "nixl": ("nixl", f"RDMA, and GPU memory between hosts; {install_hint('nixl')}"),
        "starlette": ("starlette", f"hosting a hub; {install_hint('hub')}"),
        "gguf": ("gguf", f"conversion of K-quants and IQ types; {install_hint('gguf')}"),
        "huggingface_hub": ("huggingface_hub", f"hf:// and org/name; {install_hint('hf')}"),
        "redis": ("redis", f"several hubs that act as one; {install_hint('redis')}"),
        "ray": ("ray", f"conversions on a Ray cluster; {install_hint('ray')}"),
        "boto3": ("boto3", f"AWS profiles and SSO; {install_hint('aws')}"),
        "transformers": ("transformers", "from_pretrained, by penstock-hf"),
        "vllm": ("vllm", "--load-format penstock, by penstock-vllm"),
        "sglang": ("sglang", "--load-format penstock, by penstock-sglang"),
    }
    for name, (module, what) in needs.items():
        version = package_version(name)
        value = version or ("yes" if importable(module) else "not installed")
        # The command that installs it is of use only where it is missing.
        facts.append(Fact(name=name, value=value, why=what.partition("; pip")[0] if version else what))
    return facts


def _io_uring() -> Fact:
    """Report whether the kernel accepts reads of cached files, by opening a ring."""
    why = refusal()
    if not why:
        try:
            Uring.open(1, 1).close()
        except OSError as error:
            why = f"the kernel refuses a ring: {error.strerror}"
    return Fact(name="io_uring", value="no" if why else "yes", why=why or "fills staging for a GPU from cached files")


def find_variables() -> list[tuple[str, str | None, str]]:
    """Return Penstock's variables with their values, and the names of other ecosystems' variables that are set."""
    # Show only the names, because these values may be credentials.
    others = [(name, "(set)", what) for prefix, what in _ECOSYSTEMS.items() for name in sorted(ecosystem(prefix))]
    return [*environment(), *others]


def measure_limits(path: Path | None) -> list[Limit]:
    """Measure a host copy, reads of `path` if it is given, and copies from the host to every CUDA device."""
    limits = [_host_copy(), *_disk(path)]
    if not importable("torch"):
        return limits
    import torch

    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [*limits, *(_host_to_device(index) for index in devices)]


def _best_rate(work: Callable[[], int], *, repeat: int = 3) -> float:
    """Return the best rate in GB/s of several runs of `work`, which returns the number of bytes that it moved."""
    best = 0.0
    # Take the best rate, because the first run touches the pages and other processes only make a run slower.
    for _ in range(repeat):
        begin = time.perf_counter()
        nbytes = work()
        best = max(best, nbytes / (time.perf_counter() - begin) / GB)
    return best


def _host_copy() -> Limit:
    """Measure a copy in host memory by one thread."""
    import numpy as np

    # Write the pages first. Unwritten pages are all the same zero page, which is copied from the cache.
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)

    def copy() -> int:
        target[:] = source
        return _COPY_BYTES

    return Limit(name="host memory copy, one thread", gb_per_s=_best_rate(copy))


def _disk(path: Path | None) -> list[Limit]:
    if path is None:
        return [Limit(name="disk", gb_per_s=None, why="give --path FILE with a large file on the disk")]
    named: Mapping[str, int] = {"buffered": 0, "direct": getattr(os, "O_DIRECT", 0)}
    return [_read(path, how, flags) for how, flags in named.items()]


def _read(path: Path, how: str, flags: int) -> Limit:
    """Measure reads of `path` from its start by one thread, for at most a second."""
    name = f"disk read, {how}, one thread"
    if how == "direct" and not flags:
        return Limit(name=name, gb_per_s=None, why="this system has no direct I/O")
    try:
        file = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        return Limit(name=name, gb_per_s=None, why=f"{path}: {error.strerror}")
    # A mapping is aligned to pages, as direct I/O requires.
    buffer = memoryview(mmap.mmap(-1, _READ_CHUNK_BYTES))
    try:
        offset = 0
        begin = time.perf_counter()
        while offset < 4 * GIB and time.perf_counter() - begin < _READ_S:
            nbytes = os.preadv(file, [buffer], offset)
            offset += nbytes
            # Stop at the end of the file, because a direct read after it would not be aligned.
            if nbytes < _READ_CHUNK_BYTES:
                break
        wall_s = time.perf_counter() - begin
    except OSError as error:
        return Limit(name=name, gb_per_s=None, why=f"{path}: {error.strerror}")
    finally:
        os.close(file)
    if not offset:
        return Limit(name=name, gb_per_s=None, why=f"{path} is empty")
    return Limit(name=name, gb_per_s=offset / wall_s / GB)


def _host_to_device(index: int) -> Limit:
    """Measure copies from pinned host memory to a device."""
    import torch

    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")

    def copy() -> int:
        device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(index)
        return _COPY_BYTES

    return Limit(name=f"pinned memory to cuda:{index}", gb_per_s=_best_rate(copy))
