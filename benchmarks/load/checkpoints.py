"""Writes benchmark checkpoints fast: many threads, one random tile, each segment a different rotation of it.

In: a directory, tensor shapes, a number of files. Out: safetensors files and a `Checkpoint` that names them.
Not here: checkpoints with every dtype for tests (`penstock.testing.checkpoints`).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB = 1 << 20
TILE_BYTES = 64 * MIB
Shapes = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on a file system; `nbytes` counts tensor bytes, not headers."""

    directory: str
    files: tuple[str, ...]
    nbytes: int
    num_tensors: int


def dense_shapes(total_bytes: int) -> Shapes:
    """BF16 layers of Llama-3-8B's shapes (436 MB a layer) up to `total_bytes`; a sixteenth of the width below 2 GB."""
    width = 4096 if total_bytes >= 2 * 10**9 else 256
    inner, kv = width * 7 // 2, width // 4
    layer = (
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (kv, width)),
        ("self_attn.v_proj", (kv, width)),
        ("self_attn.o_proj", (width, width)),
        ("mlp.gate_proj", (inner, width)),
        ("mlp.up_proj", (inner, width)),
        ("mlp.down_proj", (width, inner)),
        ("input_layernorm", (width,)),
        ("post_attention_layernorm", (width,)),
    )
    layer_bytes = sum(2 * int(np.prod(shape)) for _, shape in layer)
    num_layers = max(1, round(total_bytes / layer_bytes))
    return [(f"model.layers.{i}.{name}.weight", shape) for i in range(num_layers) for name, shape in layer]


def moe_shapes(num_tensors: int) -> Shapes:
    """BF16 experts of 64 KiB each."""
    return [
        (f"model.layers.{i // 768}.mlp.experts.{i % 768 // 3}.{('gate', 'up', 'down')[i % 3]}_proj.weight", (128, 256))
        for i in range(num_tensors)
    ]


def _header(shapes: Shapes) -> tuple[bytes, int]:
    entries: dict[str, object] = {}
    stop = 0
    for name, shape in shapes:
        start, stop = stop, stop + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, stop


def write(directory: str, shapes: Shapes, *, num_files: int = 4, threads: int = 0) -> Checkpoint:
    """Writes `shapes` into `num_files` safetensors files of consecutive tensors, synced to the device.

    Cost: the tile is drawn once; the rest is `pwritev` from `threads` threads (0: one a core, 16 at most).
    """
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    tile = memoryview(np.random.default_rng(20261121).bytes(TILE_BYTES))
    paths, segments, total = [], [], 0
    for index, rows in enumerate(np.array_split(np.arange(len(shapes)), num_files)):
        path = f"{directory}/model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        header, body_bytes = _header([shapes[i] for i in rows])
        with Path(path).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + body_bytes)
        paths.append(path)
        total += body_bytes
        segments += [
            (path, len(header), at, min(TILE_BYTES, body_bytes - at)) for at in range(0, body_bytes, TILE_BYTES)
        ]

    def fill(number: int) -> None:
        path, base, at, nbytes = segments[number]
        turn = (number * 104_729 + 1) * 4_099 % TILE_BYTES
        pieces = [tile[turn:][:nbytes], tile[: max(0, nbytes - (TILE_BYTES - turn))]]
        fd = os.open(path, os.O_WRONLY)
        try:
            done = 0
            while done < nbytes:
                wrote = os.pwritev(fd, [p for p in pieces if len(p)], base + at + done)
                done += wrote
                pieces = [pieces[0][wrote:], pieces[1][max(0, wrote - len(pieces[0])) :]]
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(len(segments))))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return Checkpoint(directory=directory, files=tuple(paths), nbytes=total, num_tensors=len(shapes))


def link(checkpoint: Checkpoint, directory: str) -> Checkpoint:
    """The same files under another directory (hard links): the place of a sidecar that the first must not have."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    paths = [f"{directory}/{os.path.basename(path)}" for path in checkpoint.files]
    for old, new in zip(checkpoint.files, paths, strict=True):
        os.link(old, new)
    return Checkpoint(
        directory=directory, files=tuple(paths), nbytes=checkpoint.nbytes, num_tensors=checkpoint.num_tensors
    )


def room_bytes(directory: str) -> int:
    """Free bytes of the file system `directory` is on."""
    return shutil.disk_usage(directory).free
