"""The rows of `benchmarks.ab`, in a process that imports one tree: `python ab_rows.py ROW[,ROW] DATA`, with PYTHONPATH.

In: names of rows, and the directory of checkpoints that the runner wrote. Out: a line of JSON with the seconds of each
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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
SYNCED_WIDTH = {"cpu": 2048, "cuda": 4096}
"""Tensors of the sync rows, and BF16 numbers in a row of each: 256 MiB, and 1 GiB on a device. Reason: on an H200, 128
MiB take 20 ms, and two series of the same commit differ by 6 %."""
FP8 = "fp8-block128"
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


def fetch(data: Path, holder: Helper) -> float:
    """Fetch from one member over HTTP on loopback; the receiver joins and leaves each time."""
    holder.wait()
    return _fetch("fetch", "cpu", _http())


def hold(data: Path) -> Iterator[None]:
    """Hold the weights that `fetch` fetches."""
    return _hold("fetch", _tensors(data / "large"), _http())


def fetch_cuda(data: Path, holder: Helper) -> float:
    """Fetch 1 GiB from one member on the same device, over CUDA IPC."""
    holder.wait()
    return _fetch("fetch_cuda", "cuda:0", None)


def hold_cuda(data: Path) -> Iterator[None]:
    """Hold the weights that `fetch_cuda` fetches."""
    return _hold("fetch_cuda", _synced("cuda", 1.0), None)


def _http() -> Any:
    return public("ConnectionSettings")(transports=["http"], listen="127.0.0.1:0")


def _fetch(name: str, device: str, connection: Any) -> float:
    join = public("join")

    def take() -> None:
        with join(name, connection=connection) as fleet:
            report = fleet.fetch({}, device=device)
            assert report.nbytes > 0 and not report.storage_bytes, report

    return timed(take, repeat=6 if device != "cpu" else 4)


def _hold(name: str, tensors: dict[str, Any], connection: Any) -> Iterator[None]:
    with public("join")(name, connection=connection, max_readers=8) as fleet:
        fleet.offer(tensors)
        yield
        yield


class Synced(NamedTuple):
    """How a row synchronises: where the weights are, and the modes of both sides."""

    device: str
    publish: str = "snapshot"
    update: str = "staged"
    format: str | None = None


SYNCED = {
    "sync": Synced("cpu"),
    "sync_cuda": Synced("cuda"),
    "sync_live_cuda": Synced("cuda", "live", "direct"),
    "sync_staged_cuda": Synced("cuda", "live", "staged"),
    "sync_fp8_cuda": Synced("cuda", "live", "staged", FP8),
}
"""The rows of one publisher and one subscriber. On a device, the bytes move over CUDA IPC."""


def sync(name: str, trainer: Helper) -> float:
    """Publish in one process and update in another. The update ends when its device is done."""
    import torch

    how = SYNCED[name]
    trainer.wait()
    served = _served(how)
    with public("subscriber")(name, served, mode=how.update, transforms=how.format) as subscriber:
        version = 0

        def update() -> None:
            nonlocal version
            version += 1
            trainer.begin()
            subscriber.update(version, UPDATE_S)
            if how.device == "cuda":
                torch.cuda.synchronize()
            trainer.wait()

        seconds = timed(update, repeat=6)
        for served_name, tensor in served.items():
            # A block of equal values has this value as scale * code, and 448 is the largest code.
            codes = tensor.float() if how.format is None or tensor.dtype != torch.float32 else tensor * 448
            wanted = 448.0 if tensor.element_size() == 1 else float(version)
            assert torch.allclose(codes.float(), torch.tensor(wanted, device=tensor.device)), served_name
        return seconds


def train(name: str) -> Iterator[None]:
    """Publish a version at each step, each of whose tensors has the version's number as its values."""
    how = SYNCED[name]
    trained = _synced(how.device, 0.0)
    with public("publisher")(name, trained, mode=how.publish, transforms=how.format) as publisher:
        yield
        version = 0
        while True:
            version += 1
            for tensor in trained.values():
                tensor.fill_(version)
            publisher.publish(version)
            yield


def _synced(device: str, value: float) -> dict[str, Any]:
    import torch

    width = SYNCED_WIDTH[device]
    names = (f"model.layers.{number}.mlp.up_proj.weight" for number in range(NUM_SYNCED))
    return {name: torch.full((width, width), value, dtype=torch.bfloat16, device=device) for name in names}


def _served(how: Synced) -> dict[str, Any]:
    import torch

    tensors = _synced(how.device, 0.0)
    if how.format is None:
        return tensors
    blocks = SYNCED_WIDTH[how.device] // 128
    codes = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    return codes | {f"{name}_scale_inv": torch.zeros(blocks, blocks, device=how.device) for name in tensors}


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


class Row(NamedTuple):
    """What a row runs, and what the process beside it does, if there is one."""

    run: Callable[..., float]
    helper: Callable[[Path], Iterator[None]] | None = None


def _sync_row(name: str) -> Row:
    return Row(lambda data, trainer: sync(name, trainer), lambda data: train(name))


ROWS = {
    "load": Row(load_cpu),
    "load_into": Row(load_into),
    "stream": Row(stream),
    "fetch": Row(fetch, hold),
    "sync": _sync_row("sync"),
    "convert": Row(convert),
    "start": Row(start),
    "manifest": Row(manifest),
}
DEVICE_ROWS = {
    "load_cuda": Row(load_cuda),
    "fetch_cuda": Row(fetch_cuda, hold_cuda),
    **{name: _sync_row(name) for name, how in SYNCED.items() if how.device == "cuda"},
}
"""The rows that need a device. The runner measures them in one process, because each process imports torch and makes a
context."""


def _tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


class Helper:
    """The other process of a row. `begin` asks it for a step, and `wait` waits until the step is done."""

    def __init__(self, row: str, data: Path) -> None:
        command = [sys.executable, __file__, "--helper", row, str(data)]
        self._row = row
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def wait(self) -> None:
        """Wait for the end of the step that was begun last. The first step begins with the process."""
        if self._output.readline() != "done\n":
            raise SystemExit(f"the helper of {self._row} ended with {self._process.wait(30)}")

    def begin(self) -> None:
        """Begin the next step."""
        self._input.write("step\n")
        self._input.flush()

    def close(self) -> None:
        """End the process."""
        self._input.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def help_row(row: str, data: Path) -> None:
    """Be the helper of a row until standard input ends."""
    helper = (ROWS | DEVICE_ROWS)[row].helper
    assert helper is not None
    steps = helper(data)
    next(steps)
    print("done", flush=True)
    for _ in sys.stdin:
        next(steps)
        print("done", flush=True)


def main() -> None:
    """Run rows in their order. Their helpers start together, because each imports torch."""
    if sys.argv[1] == "--helper":
        help_row(sys.argv[2], Path(sys.argv[3]))
        return
    names, data = sys.argv[1].split(","), Path(sys.argv[2])
    rows = {name: (ROWS | DEVICE_ROWS)[name] for name in names}
    # A short path: it is that of a socket. New for each run: no member of another one answers.
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as runtime, ExitStack() as stack:
        os.environ["PENSTOCK_RUNTIME_DIR"] = runtime
        helpers = {name: [Helper(name, data)] if row.helper else [] for name, row in rows.items()}
        for started in helpers.values():
            for helper in started:
                stack.callback(helper.close)
        seconds = {name: row.run(data, *helpers[name]) for name, row in rows.items()}
    import penstock

    print(json.dumps({"seconds": seconds, "file": penstock.__file__}))


if __name__ == "__main__":
    main()
