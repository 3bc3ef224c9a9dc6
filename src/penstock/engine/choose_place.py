"""Choose the destination memory for a device, and the registrar that pins host memory for it.

In: a torch device. Out: a `HostPlace` or `CudaPlace`; a `Registrar`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.engine.place import HostPlace
from penstock.memory.staging import Registrar

if TYPE_CHECKING:
    import torch

    from penstock.engine.place_cuda import CudaPlace


def place_on(
    device: torch.device, slab_nbytes: Sequence[int], slabs: Sequence[torch.Tensor] | None = None
) -> HostPlace | CudaPlace:
    """Slabs on a device: `slabs`, flat uint8 tensors to fill, or new ones."""
    if device.type == "cpu":
        return HostPlace(slab_nbytes, None if slabs is None else [slab.numpy() for slab in slabs])
    from penstock.engine.place_cuda import CudaPlace

    return CudaPlace(device, slab_nbytes, slabs)


def registrar_of(device: torch.device) -> Registrar | None:
    """Return what pins host memory for a device; None where none does."""
    if device.type != "cuda":
        return None
    from penstock.engine.place_cuda import CudaRegistrar

    return CudaRegistrar(device)
