"""What several tests compare with: tensors as safetensors itself reads them, bit for bit; and what a load may leave."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def by_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the directory's files, by the format's own reader."""
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes: equal only if everything is."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def all_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The same of every tensor in a few characters, to be sent between processes."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    dtype, shape, raw = bits(tensor)
    return f"{dtype}{shape}{hashlib.sha256(raw).hexdigest()}"


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, device: str = "cpu") -> None:
    """The same names, dtypes, shapes and bytes; `found` all on `device`."""
    assert sorted(found) == sorted(wanted)
    assert {str(tensor.device) for tensor in found.values()} <= {device}
    assert [name for name in wanted if bits(found[name]) != bits(wanted[name])] == []


def own_threads() -> list[str]:
    """Threads of Penstock's that run now."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
