"""The call of each loader, as its own documentation says, with its defaults.

In: the files, their directory, a device, a process group or None. Out: `{name: tensor}`, owned and usable.
Not here: what is timed and checked (`measure`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of a loader."""

    directory: str
    files: tuple[str, ...]
    device: str
    group: Any = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A loader to be measured. `modules` are imported before the clock starts."""

    run: Callable[[Call], dict[str, Any]]
    modules: Sequence[str] = ()
    package: str = ""
    devices: tuple[str, ...] = ("cuda", "cpu")
    environ: dict[str, str] = field(default_factory=dict)


def _safetensors(call: Call) -> dict[str, Any]:
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for path in call.files:
        out.update(load_file(path, device=call.device))
    return out


def _runai(call: Call) -> dict[str, Any]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(call.files), device=call.device, is_distributed=call.group is not None)
        return dict(streamer.get_tensors())


def _fastsafetensors(call: Call) -> dict[str, Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    ranks = 1 if call.group is None else call.group.size()
    loader = SafeTensorsFileLoader(call.group or SingleGroup(), device=call.device, nogds=True)
    loader.add_filenames({rank: list(call.files[rank::ranks]) for rank in range(ranks)})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}


def _instanttensor(call: Call, **options: Any) -> dict[str, Any]:
    from instanttensor import safe_open

    with safe_open(list(call.files), framework="pt", device=call.device, process_group=call.group, **options) as file:
        return dict(file.tensors())


def _instanttensor_buffered(call: Call) -> dict[str, Any]:
    from instanttensor import BackendPolicy

    return _instanttensor(call, backend=BackendPolicy.BUFFERED)


def _penstock(call: Call, **options: Any) -> dict[str, Any]:
    import penstock

    settings = penstock.ReadSettings(memory_bytes=call.memory_bytes)
    given = {"device": call.device, "group": call.group, "settings": settings} | options
    weights: dict[str, Any] = penstock.load(call.directory, **given)
    return weights


def _prototype(call: Call, *, num_threads: int = 12, chunk_bytes: int = 8 * MIB) -> dict[str, Any]:
    """Threads, `preadv` into a registered ring, async copies, one destination a file: what plain Python reaches."""
    import torch
    from benchmarks.load.limits import Ring

    device = torch.device(call.device)
    cuda = device.type == "cuda"
    ring = Ring(2 * num_threads * chunk_bytes, register=cuda)
    work, bodies, headers = [], [], []
    for index, path in enumerate(call.files):
        fd = os.open(path, os.O_RDONLY)
        (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        headers.append(json.loads(os.pread(fd, length, 8)))
        nbytes = os.fstat(fd).st_size - 8 - length
        bodies.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        work += [(fd, 8 + length, index, at, min(chunk_bytes, nbytes - at)) for at in range(0, nbytes, chunk_bytes)]
    jobs, lock = iter(work), threading.Lock()

    def copy(slot: int) -> None:
        stream = torch.cuda.Stream(device) if cuda else None
        events: list[Any] = [None, None]
        for turn in range(len(work)):
            with lock:
                job = next(jobs, None)
            if job is None:
                break
            fd, base, index, at, nbytes = job
            half = turn & 1
            start = (2 * slot + half) * chunk_bytes
            if events[half] is not None:
                events[half].synchronize()
            got = 0
            while got < nbytes:
                got += os.preadv(fd, [ring.view[start + got : start + nbytes]], base + at + got)
            with torch.cuda.stream(stream):
                bodies[index][at : at + nbytes].copy_(ring.tensor[start : start + nbytes], non_blocking=True)
                if stream is not None:
                    events[half] = stream.record_event()
        if stream is not None:
            stream.synchronize()

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = {}
    for body, header in zip(bodies, headers, strict=True):
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                out[name] = body[start:stop].view(torch.bfloat16).view(entry["shape"])
    return out


_PENSTOCK = ("penstock", "penstock")
LOADERS: dict[str, Loader] = {
    "penstock": Loader(run=_penstock, modules=_PENSTOCK, package="penstock"),
    "penstock-noverify": Loader(run=lambda call: _penstock(call, verify=False), modules=_PENSTOCK, package="penstock"),
    "penstock-verify": Loader(run=lambda call: _penstock(call, verify=True), modules=_PENSTOCK, package="penstock"),
    "safetensors": Loader(run=_safetensors, modules=("safetensors.torch",), package="safetensors"),
    "runai": Loader(
        run=_runai,
        modules=("runai_model_streamer",),
        package="runai-model-streamer",
        environ={"RUNAI_STREAMER_LOG_LEVEL": "ERROR"},
    ),
    "fastsafetensors": Loader(run=_fastsafetensors, modules=("fastsafetensors",), package="fastsafetensors"),
    "instanttensor": Loader(run=_instanttensor, modules=("instanttensor",), package="instanttensor", devices=("cuda",)),
    "instanttensor-buffered": Loader(
        run=_instanttensor_buffered, modules=("instanttensor",), package="instanttensor", devices=("cuda",)
    ),
    "prototype": Loader(run=_prototype),
}
PEERS = ("safetensors", "runai", "fastsafetensors", "instanttensor", "instanttensor-buffered")


def missing(name: str, device: str) -> str:
    """Return why `name` cannot be measured here; empty if it can."""
    loader = LOADERS[name]
    if device not in loader.devices:
        return f"it does not load to {device}"
    absent = [module for module in loader.modules if importlib.util.find_spec(module.split(".")[0]) is None]
    return f"{loader.package} is not installed" if absent else ""


def prepare(name: str) -> None:
    """Imports what `name` needs, so that the clock measures loading alone."""
    os.environ.update(LOADERS[name].environ)
    for module in LOADERS[name].modules:
        importlib.import_module(module)
    import torch

    if LOADERS[name].package == "penstock":
        importlib.import_module("penstock.loader.load")
    if LOADERS[name].package == "penstock" and torch.cuda.is_available():
        importlib.import_module("penstock.engine.place")
        if name == "penstock-verify":
            importlib.import_module("penstock.engine.check")
