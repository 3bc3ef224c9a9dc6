"""Peak host memory of every way to load weights, as docs/operate/memory.md states it.

Each way runs in a forked process. Its first load is of a small checkpoint, so that imports do not count. The large
checkpoint is several times larger than the bounds, and its bytes are holes, so that writing it takes no time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.testing.checkpoints import LlamaShape
from penstock.types import GIB, MIB

STAGING_BYTES = 32 * MIB
"""PENSTOCK_MEMORY_BYTES of every process."""
SLACK_BYTES = 144 * MIB
"""Threads, allocators and the interpreter's own objects, which do not depend on the size of the checkpoint.

The arenas of 32 reading threads differ by 56 MB between equal runs (n = 20)."""
TOTAL_BYTES = GIB // 2
NAME = "model.safetensors"

RUNNER = """
import json, os, sys, traceback, warnings
warnings.simplefilter("ignore")
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
import penstock
from penstock_dcp import CheckpointReader
from penstock_hf.patched_libraries import patched_libraries
from penstock_hf.runai_streamer import SafetensorsStreamer
from penstock_hf.safetensors import installed
from penstock_hf.transformers import from_pretrained

def bytes_of(*fields):
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.split(":")[0] in fields)

def dropped(pairs):
    return sum(tensor.nbytes for name, tensor in pairs)

def each(file):
    with file:
        return dropped((name, file.get_tensor(name)) for name in file.keys())

def of_file(place):
    return f"{place}/model.safetensors"

def within_installed(call):
    with installed():
        return call()

def streamed(place, consume):
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([of_file(place)])
        return consume(streamer.get_tensors())

def by_dcp(place):
    with penstock.safe_open(of_file(place)) as file:
        state = {name: torch.empty_like(file.get_tensor(name)) for name in file.keys()}
    dcp.load(state, storage_reader=CheckpointReader(place), no_dist=True)
    return state

def fetched(place):
    tensors = {}
    fleets.append(penstock.join(os.path.basename(place)))
    fleets[-1].fetch(tensors, timeout_s=60)
    return tensors

def patched(place):
    with patched_libraries():
        return transformers.LlamaForCausalLM.from_pretrained(place)

fleets = []
DOORS = {
    "load": penstock.load,
    "load, copied": lambda place: penstock.load(place, settings=penstock.ReadSettings(copy=True)),
    "stream": lambda place: dropped(penstock.stream(place)),
    "load_file": lambda place: penstock.load_file(of_file(place)),
    "load_file after install()": lambda place: within_installed(lambda: safetensors.torch.load_file(of_file(place))),
    "safe_open": lambda place: each(penstock.safe_open(of_file(place))),
    "safe_open after install()": lambda place: within_installed(
        lambda: each(safetensors.safe_open(of_file(place), framework="pt"))
    ),
    "Run:ai": lambda place: streamed(place, dict),
    "Run:ai, dropped": lambda place: streamed(place, dropped),
    "DCP": by_dcp,
    "fetch": fetched,
    "attach": lambda place: penstock.cache.attach(os.path.basename(place), timeout_s=60),
    "from_pretrained": lambda place: from_pretrained(transformers.LlamaForCausalLM, place, progress=False),
    "patched_libraries()": patched,
}

def measure(door, small, large, environ):
    os.environ.update(environ)
    kept = [DOORS[door](small)]
    before = bytes_of("VmHWM"), bytes_of("RssAnon", "RssShmem")
    kept.append(DOORS[door](large))
    after = bytes_of("VmHWM"), bytes_of("RssAnon", "RssShmem")
    print(json.dumps([now - then for now, then in zip(after, before)]), flush=True)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            measure(*json.loads(line))
        except BaseException:
            print(json.dumps(traceback.format_exc()), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""

Growth = Callable[..., tuple[int, int]]


@pytest.fixture(scope="module")
def growth() -> Iterator[Growth]:
    """Return a function that measures by how much memory grows in a forked process: its peak, and what is no file."""
    with subprocess.Popen([sys.executable, "-c", RUNNER], stdin=-1, stdout=-1, text=True) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        stop = threading.Timer(900, runner.kill)
        stop.start()

        def measure(door: str, small: str, large: str, runtime_dir: Path) -> tuple[int, int]:
            assert runner.stdin is not None and runner.stdout is not None
            environ = {"PENSTOCK_MEMORY_BYTES": str(STAGING_BYTES), "PENSTOCK_RUNTIME_DIR": str(runtime_dir)}
            print(json.dumps([door, small, large, environ]), file=runner.stdin, flush=True)
            answer = json.loads(runner.stdout.readline())
            assert isinstance(answer, list), answer
            return answer[0], answer[1]

        yield measure
        runner.stdin.close()
        runner.wait(60)
        stop.cancel()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small and a large Llama, whose weights are holes in their files."""
    root = tmp_path_factory.mktemp("models")
    for name, total_bytes in (("small", 4 * MIB), ("large", TOTAL_BYTES)):
        shape = LlamaShape.of_bytes(total_bytes, fp8=False)
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(shape.config()))
        header, stop = {}, 0
        for tensor in shape.tensors(fp8=False):
            start, stop = stop, stop + tensor.nbytes
            header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, stop]}
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        raw += b" " * (-len(raw) % 8)
        with (root / name / NAME).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + stop)
    return root


@pytest.mark.parametrize(
    "door",
    ["load", "load_file", "load_file after install()", "Run:ai", "safe_open after install()", "patched_libraries()"],
)
def test_mapped_file_needs_no_own_memory(door: str, places: Path, tmp_path: Path, growth: Growth) -> None:
    peak, own = growth(door, str(places / "small"), str(places / "large"), tmp_path)
    assert own <= SLACK_BYTES
    assert peak <= TOTAL_BYTES + SLACK_BYTES


@pytest.mark.parametrize("door", ["load, copied", "DCP", "from_pretrained"])
def test_copied_weights_need_their_bytes_and_staging(door: str, places: Path, tmp_path: Path, growth: Growth) -> None:
    peak, _ = growth(door, str(places / "small"), str(places / "large"), tmp_path)
    assert peak <= TOTAL_BYTES + STAGING_BYTES + SLACK_BYTES


@pytest.mark.parametrize("door", ["load", "load_file", "load_file after install()"])
def test_weights_of_uri_need_their_bytes_and_staging(door: str, places: Path, tmp_path: Path, growth: Growth) -> None:
    with RangeServer(places) as server:
        peak, _ = growth(door, f"{server.url}/small", f"{server.url}/large", tmp_path)
    assert peak <= TOTAL_BYTES + STAGING_BYTES + SLACK_BYTES


@pytest.mark.parametrize(
    ("door", "where"),
    [
        *((door, where) for door in ("stream", "safe_open", "safe_open after install()") for where in ("file", "http")),
        # Run:ai's names have no http.
        ("Run:ai, dropped", "file"),
    ],
)
def test_dropped_tensors_need_staging_and_one_tensor(
    door: str, where: str, places: Path, tmp_path: Path, growth: Growth
) -> None:
    with RangeServer(places) as server:
        root = server.url if where == "http" else str(places)
        peak, _ = growth(door, f"{root}/small", f"{root}/large", tmp_path)
    # The next tensor is made while the caller still has one.
    largest_bytes = max(tensor.nbytes for tensor in LlamaShape.of_bytes(TOTAL_BYTES, fp8=False).tensors(fp8=False))
    # `stream` reads memory_bytes ahead, beside the staging buffers.
    bound = (2 if door == "stream" else 1) * STAGING_BYTES + 2 * largest_bytes + SLACK_BYTES
    assert peak <= bound < TOTAL_BYTES


@pytest.mark.parametrize(("door", "copies"), [("attach", 1), ("fetch", 2)])
def test_weights_of_peer_need_shared_and_own_copy(
    door: str, copies: int, places: Path, tmp_path: Path, growth: Growth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shared memory the pages of the peer are mapped too. They count for this process, but exist once."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with penstock.cache.WeightCache(memory_bytes=2 * TOTAL_BYTES) as cache:
        for name in ("small", "large"):
            cache.keep(name, places / name)
        peak, _ = growth(door, "small", "large", tmp_path)
    assert peak <= copies * TOTAL_BYTES + STAGING_BYTES + SLACK_BYTES
