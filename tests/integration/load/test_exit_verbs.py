"""Every verb in an `atexit` handler works, or raises an error with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import atexit, sys, threading, time, warnings
import torch
import torch.distributed.checkpoint as dcp
import penstock as ps
from penstock_dcp import CheckpointReader, CheckpointWriter

uri, made, how = sys.argv[1:]
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1 << 18))

def load():
    assert ps.load(uri)["a"][-1] == 1

def stream():
    with ps.stream(uri) as tensors:
        assert len(list(tensors)) == 1

def start_loading():
    module = Model()
    with ps.modules.load_in_background(module, uri) as loading:
        loading.wait()
    assert module.a[-1] == 1

def convert():
    ps.convert(uri, f"{made}/small", to="cast:BF16")

def convert_in_processes():
    ps.convert(uri, f"{made}/processes", to="cast:BF16", workers=2)

def fetch():
    with ps.join("m") as fleet:
        fleet.fetch({}, fallback=uri)

def publish():
    with ps.publisher("p", {"a": torch.ones(4)}, mode="snapshot") as publisher:
        publisher.publish(1)
        with ps.subscriber("p", {"a": torch.zeros(4)}) as subscriber:
            subscriber.update()

def save():
    dcp.save({"a": torch.ones(1 << 18)}, storage_writer=CheckpointWriter(f"{made}/saved"))
    state = {"a": torch.zeros(1 << 18)}
    dcp.load(state, storage_reader=CheckpointReader(f"{made}/saved"))
    assert state["a"][-1] == 1

def refuse():
    # Python 3.12 behaves like this in an exit handler.
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start

def last():
    if how == "refused":
        refuse()
    try:
        threading.Thread(target=int).start()
        print("python starts threads")
    except RuntimeError:
        print("python refuses threads")
    for verb in (load, stream, start_loading, convert, convert_in_processes, fetch, publish, save):
        try:
            verb()
            print(verb.__name__, "worked")
        except ps.PenstockError as error:
            print(verb.__name__, type(error).__name__, error.message, error.hint, sep="|")
    until = time.monotonic() + 10
    while (left := [t.name for t in threading.enumerate() if "penstock" in t.name]) and time.monotonic() < until:
        time.sleep(0.02)
    print("threads", left)

atexit.register(last)
"""

NEED_THREADS = {"load", "stream", "start_loading", "convert", "fetch", "publish"}


def run_at_exit(directory: Path, how: str) -> dict[str, str]:
    """Run every verb in an exit handler. Return the outcome of each."""
    save_file({"a": torch.ones(1 << 18)}, directory / "m.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory / "m.safetensors"), str(directory), how],
        env=os.environ | {"PENSTOCK_RUNTIME_DIR": str(directory / "rt"), "PENSTOCK_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    outcomes = dict(line.replace("|", " ", 1).split(" ", 1) for line in done.stdout.splitlines())
    assert outcomes.pop("threads") == "[]"
    return outcomes


@pytest.mark.parametrize("how", ["allowed", "refused"])
def test_calls_in_exit_handler_finish_or_raise(tmp_path: Path, how: str) -> None:
    outcomes = run_at_exit(tmp_path, how)
    # Python 3.12 refuses threads in an exit handler. 3.11 and 3.13 start them.
    if outcomes.pop("python") == "starts threads":
        assert how == "allowed" and set(outcomes.values()) == {"worked"}, outcomes
        return
    assert {verb for verb, outcome in outcomes.items() if outcome != "worked"} == NEED_THREADS
    for verb in NEED_THREADS:
        kind, message, hint = outcomes[verb].split("|")
        assert (kind, message) == (
            "DestinationError",
            "cannot start a thread because the interpreter is shutting down",
        ), verb
        assert "before the program ends" in hint and "ulimit" not in hint
