"""Programs that exit or fork while a stream is partly read end at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import os, sys, threading, time
import torch
import penstock as ps
from penstock.errors import ConfigError
from penstock.storage import register_storage

path, how = sys.argv[1:]

class Stuck:
    # Later reads of this file hang, like reads from a dead server.
    identity = "1"

    def __init__(self, uri):
        self.uri, self.file = uri, open(uri.removeprefix("stuck://"), "rb")
        self.nbytes = os.fstat(self.file.fileno()).st_size

    def readv(self, offset, buffers):
        if offset > (6 << 20):
            threading.Event().wait()
        os.preadv(self.file.fileno(), buffers, offset)
        return "stuck"

    def close(self):
        self.file.close()

class StuckStorage:
    def open(self, uri, *, settings, storage_options):
        return Stuck(uri)

    def list(self, uri, *, settings, storage_options):
        return []

    def read_small(self, uri, *, settings, storage_options):
        return None

register_storage("stuck", StuckStorage)
uri = "stuck://" + path

def read_beside(tensors):
    # This reader waits for a tensor and holds the stream's lock when the program exits.
    threading.Thread(target=lambda: list(tensors), daemon=True).start()
    time.sleep(0.5)

def generated():
    with ps.stream(uri, progress=lambda *_: None) as tensors:
        yield next(tensors)
        read_beside(tensors)
        yield

def closed():
    tensors = ps.stream(uri)
    try:
        yield next(tensors)
        read_beside(tensors)
        yield
    finally:
        tensors.close()

def offered():
    with ps.join("m") as fleet:
        yield fleet.offer({"w": torch.zeros(4)})

made = {"generator": generated, "finally": closed, "fleet": offered}
kept = made[how]() if how in made else ps.stream(uri)
next(kept)
if how in ("generator", "finally"):
    next(kept)
if how == "fork":
    child = os.fork()
    if child == 0:
        try:
            next(kept)
        except ConfigError:
            kept.close()
            del kept
            sys.exit(0)
        sys.exit(1)
    assert os.waitpid(child, 0)[1] == 0
sys.exit(0)
"""


@pytest.mark.parametrize("how", ["stream", "generator", "finally", "fork", "fleet"])
def test_program_with_partly_read_stream_exits(tmp_path: Path, how: str) -> None:
    save_file({f"w{number}": torch.zeros(1 << 20) for number in range(4)}, tmp_path / "m.safetensors")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "PENSTOCK_RUNTIME_DIR": str(tmp_path / "rt"),
        "PENSTOCK_CHUNK_BYTES": "1048576",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "m.safetensors"), how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
