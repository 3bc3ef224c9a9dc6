"""The rows of `benchmarks.ab`, each in a process that imports one tree: `python ab_rows.py ROW DATA`, with PYTHONPATH.

In: the row's name, and the directory of checkpoints that the runner wrote. Out: a line of JSON with the seconds of the
row and the place of the imported package.
Not here: the trees, the turns, the ratio (`ab`).

A row uses public names alone, by `NAMES`: a name that a tree has elsewhere gets another place there, and nowhere else.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = {
    "ConnectionSettings": ["penstock:ConnectionSettings"],
    "convert": ["penstock:convert"],
    "inspect": ["penstock:inspect"],
    "join": ["penstock:join"],
    "load": ["penstock:load"],
    "load_into": ["penstock:load_into"],
    "manifest": ["penstock:manifest"],
    "publisher": ["penstock:publisher", "penstock.sync:publisher"],
    "stream": ["penstock:stream"],
    "subscriber": ["penstock:subscriber", "penstock.sync:subscriber"],
    "verify": ["penstock:verify"],
}
"""Where a name may be, in either tree: `module:name`, the first that exists."""

NUM_SYNCED = 32
SYNCED_NUMBERS = {"cpu": 1 << 21, "cuda": 1 << 24}
"""Tensors of the sync rows, and BF16 numbers in each: 128 MiB, and 1 GiB on a device. Reason: on an H200 128 MiB take
20 ms, and two series of the same commit differ by 6 %."""
UPDATE_S = 60.0
"""Longest update. A row that waits for ever would use up the machine's time without a word."""


def public(name: str) -> Any:
    """Return a public name of the tree."""
    for place in NAMES[name]:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise SystemExit(f"{name} is at none of {NAMES[name]}: add its place to NAMES in {__file__}")


def read_options(**options: Any) -> dict[str, Any]:
    """Return options of a read as keyword arguments. Older trees take each as an argument of its own."""
    settings = getattr(importlib.import_module("penstock"), "ReadSettings", None)
    return options if settings is None else {"settings": settings(**options)}


def timed(work: Callable[[], object], *, repeat: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the least of the seconds of some calls, after one that warms up: other programs only ever add to it."""
    seconds = []
    for turn in range(repeat + 1):
        before()
        began = time.perf_counter()
        work()
        if turn:
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def load_cpu(data: Path) -> float:
    """Load files of the page cache into memory of the process."""
    load = public("load")
    copied = read_options(copy=True)
    return timed(lambda: load(data / "large", "cpu", **copied), repeat=5)


def load_into(data: Path) -> float:
    """Load many small tensors into tensors that are there."""
    import torch

    target = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in _tensors(data / "small").items()}
    into = public("load_into")
    return timed(lambda: into(target, data / "small"), repeat=5)


def stream(data: Path) -> float:
    """Take tensors one by one."""
    open_stream = public("stream")

    def take() -> None:
        with open_stream(data / "large", "cpu") as tensors:
            for _ in tensors:
                pass

    return timed(take, repeat=5)


def fetch(data: Path) -> float:
    """Fetch from one member over HTTP on loopback; the receiver joins and leaves each time."""
    join = public("join")
    settings = public("ConnectionSettings")(transports=["http"], listen="127.0.0.1:0")

    def take() -> None:
        with join("ab", connection=settings) as fleet:
            report = fleet.fetch({}, device="cpu")
            assert report.nbytes > 0 and not report.storage_bytes, report

    with helper("hold", data):
        return timed(take, repeat=4)


def hold(data: Path) -> Iterator[None]:
    """Hold the weights that `fetch` fetches."""
    settings = public("ConnectionSettings")(transports=["http"], listen="127.0.0.1:0")
    with public("join")("ab", connection=settings, max_readers=8) as fleet:
        fleet.offer(_tensors(data / "large"))
        yield
        yield


def sync_cpu(data: Path) -> float:
    """Publish a snapshot in one process and update, staged, in another."""
    return _sync(data, "cpu", "train_cpu")


def sync_cuda(data: Path) -> float:
    """Publish and update on one device, over CUDA IPC."""
    return _sync(data, "cuda", "train_cuda")


def _sync(data: Path, device: str, trainer: str) -> float:
    import torch

    with helper(trainer, data) as step:
        served = _synced(device, 0.0)
        with public("subscriber")("ab", served) as subscriber:
            version = 0

            def update() -> None:
                nonlocal version
                version += 1
                step()
                subscriber.update(version, UPDATE_S)
                if device == "cuda":
                    torch.cuda.synchronize()

            seconds = timed(update, repeat=6)
            assert all(bool((tensor == version % 64).all()) for tensor in served.values())
            return seconds


def train_cpu(data: Path) -> Iterator[None]:
    """Publish a version at each step."""
    return _train("cpu")


def train_cuda(data: Path) -> Iterator[None]:
    """Publish a version at each step."""
    return _train("cuda")


def _train(device: str) -> Iterator[None]:
    trained = _synced(device, 0.0)
    with public("publisher")("ab", trained) as publisher:
        yield
        version = 0
        while True:
            version += 1
            for tensor in trained.values():
                tensor.fill_(version % 64)
            publisher.publish(version)
            yield


def _synced(device: str, value: float) -> dict[str, Any]:
    import torch

    shape = (SYNCED_NUMBERS[device],)
    return {f"t{n}": torch.full(shape, value, dtype=torch.bfloat16, device=device) for n in range(NUM_SYNCED)}


def convert(data: Path) -> float:
    """Convert BF16 to FP8 in blocks of 128."""
    run, into = public("convert"), data / f"out-{os.getpid()}"
    clear = lambda: shutil.rmtree(into, ignore_errors=True)  # noqa: E731
    seconds = timed(lambda: run(data / "medium", into, to="fp8-block128"), repeat=3, before=clear)
    clear()
    return seconds


def start(data: Path) -> float:
    """Import the package, and show the help of the command, each in a new interpreter."""

    def run() -> None:
        for words in (["-c", "import penstock"], ["-m", "penstock", "--help"]):
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)

    return timed(run, repeat=5)


def manifest(data: Path) -> float:
    """Write a manifest, read it, and verify a checkpoint by it."""
    write, inspect, verify = public("manifest"), public("inspect"), public("verify")

    def run() -> None:
        write(data / "large", replace=True)
        inspect(data / "large")
        verify(data / "large")

    return timed(run, repeat=4)


def load_cuda(data: Path) -> float:
    """Load files of the page cache to a device."""
    import torch

    load = public("load")

    def run() -> None:
        load(data / "large", "cuda")
        torch.cuda.synchronize()

    return timed(run, repeat=6)


ROWS: dict[str, Callable[[Path], float]] = {
    "load": load_cpu,
    "load_into": load_into,
    "stream": stream,
    "fetch": fetch,
    "sync": sync_cpu,
    "convert": convert,
    "start": start,
    "manifest": manifest,
}
DEVICE_ROWS = {"load_cuda": load_cuda, "sync_cuda": sync_cuda}
HELPERS = {"hold": hold, "train_cpu": train_cpu, "train_cuda": train_cuda}


def _tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


@contextmanager
def helper(name: str, data: Path) -> Iterator[Callable[[], None]]:
    """Run the other process of a row; yield the call that takes it one step on, once it is ready."""
    command = [sys.executable, __file__, name, str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def answer() -> None:
            if process.stdout.readline() != "done\n":
                raise SystemExit(f"{name} ended with {process.wait(30)}")

        def step() -> None:
            process.stdin.write("step\n")
            process.stdin.flush()
            answer()

        try:
            answer()
            yield step
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Run one row, or one helper of a row until its input ends."""
    name, data = sys.argv[1], Path(sys.argv[2])
    if name in HELPERS:
        steps = HELPERS[name](data)
        next(steps)
        print("done", flush=True)
        for _ in sys.stdin:
            next(steps)
            print("done", flush=True)
        steps.close()
        return
    # A short path: it is that of a socket. New for each run: no member of another one answers.
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as runtime:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime
        seconds = (ROWS | DEVICE_ROWS)[name](data)
    import penstock

    print(json.dumps({"seconds": seconds, "file": penstock.__file__}))


if __name__ == "__main__":
    main()
