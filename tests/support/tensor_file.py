"""Writes a safetensors file from bytes in memory, atomically, with Penstock's own encoder of headers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.storage.output import typed
from penstock.storage.safetensors import encode_header
from penstock.types import DType


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[DType, Sequence[int], bytes | bytearray | memoryview]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically, with permissions from the umask.

    Bodies keep the order of `tensors` if each is then aligned to its element size. Otherwise the widest come first.

    Args:
        path: replaced if it exists.
        tensors: maps each name to (dtype, shape, contiguous bytes of exactly that size).
        metadata: the file's `__metadata__`.

    Raises:
        FormatError: bytes and shape of a tensor differ, or the header would be longer than the format allows.
        DiskFull, DestinationError: `path` is unchanged.
    """
    views = {name: _bytes_of(data) for name, (_, _, data) in tensors.items()}
    names = list(tensors)
    stops = np.cumsum([0, *(views[name].nbytes for name in names)])
    widths = [max(tensors[name][0].bits // 8, 1) for name in names]
    if any(int(start) % width for start, width in zip(stops, widths, strict=False)):
        names.sort(key=lambda name: -tensors[name][0].bits)
        stops = np.cumsum([0, *(views[name].nbytes for name in names)])
    spans = pairwise(stops.tolist())
    entries = [(name, *tensors[name][:2], start, stop) for name, (start, stop) in zip(names, spans, strict=True)]
    raw = encode_header(entries, metadata, uri=str(path))
    _replace(Path(path), [memoryview(raw), *(views[name] for name in names)])


def _bytes_of(data: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast


def _replace(path: Path, parts: Sequence[memoryview]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with typed(path):
        try:
            with open(partial, "wb") as file:
                file.writelines(parts)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
