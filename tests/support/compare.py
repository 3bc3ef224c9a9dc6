"""Compare tensors bit for bit with those that safetensors reads, and list the threads that a load left running."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def by_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read every tensor in the files of a directory with the safetensors library."""
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a tensor, to compare all three at once."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def all_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a short text for each tensor, made from its dtype, shape and bytes. Processes exchange these texts."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    dtype, shape, raw = bits(tensor)
    return f"{dtype}{shape}{hashlib.sha256(raw).hexdigest()}"


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, device: str = "cpu") -> None:
    """Assert equal names, dtypes, shapes and bytes, and that every tensor in `found` is on `device`."""
    assert sorted(found) == sorted(wanted)
    assert {str(tensor.device) for tensor in found.values()} <= {device}
    assert [name for name in wanted if bits(found[name]) != bits(wanted[name])] == []


def own_threads() -> list[str]:
    """Return the names of Penstock's running threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
