"""A safetensors file with every dtype and kind of shape, written without Penstock's writer."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from math import prod
from pathlib import Path

import numpy as np

from penstock.types import DType, bits_to_bytes


def every_dtype(
    path: str | os.PathLike[str], *, seed: int = 0, aligned: bool = True, skip: Container[DType] = ()
) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    """Write one file with every dtype but `skip` in every kind of shape: plain, odd, scalar, empty.

    Tensors are ordered by element width, as safetensors does. With `aligned=False` a one-byte tensor comes first, so
    that every other tensor starts at an odd offset. Returns the dtype, the shape, and the expected bytes by name.
    """
    rng = np.random.default_rng(seed)
    made: dict[str, tuple[DType, tuple[int, ...], bytes]] = {}
    for dtype in (dtype for dtype in DType if dtype not in skip):
        # Four elements of any type fill whole bytes. Packed types do not allow odd counts.
        odd = (3, 5, 4) if dtype.bits < 8 else (3, 5, 7)
        shapes = {"matrix": (16, 24), "odd": odd, "empty": (0,), "empty_rows": (0, 8), "empty_columns": (8, 0)}
        shapes |= {"one": (1, 1, 4 if dtype.bits < 8 else 1)} | ({} if dtype.bits < 8 else {"scalar": ()})
        for shape_class, shape in shapes.items():
            nbytes = bits_to_bytes(prod(shape), dtype)
            high = 2 if dtype is DType.BOOL else 256
            data = rng.integers(0, high, nbytes, dtype=np.uint8).tobytes()
            made[f"{dtype.value.lower()}.{shape_class}"] = (dtype, shape, data)
    order = sorted(made, key=lambda name: (-made[name][0].bits if aligned else 0, name))
    if not aligned:
        made = {"a.shift": (DType.U8, (1,), b"\x01"), **made}
        order = ["a.shift", *order]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape, data = made[name]
        header[name] = {"dtype": dtype.value, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    Path(path).write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(made[name][2] for name in order))
    return made
