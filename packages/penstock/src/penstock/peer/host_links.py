"""The network links of this host, and the link nearest to a GPU, read from the kernel's PCI tree."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")


def _rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir(SYS / "class/infiniband"))
    except OSError:
        return []


def host_links() -> int:
    """Return the number of parallel links to other hosts: the number of RDMA devices, or 1 without RDMA."""
    return max(1, len(_rdma_devices()))


def nearest_link(gpu_uuid: str) -> str:
    """Return the RDMA device that shares the most PCI bridges with a GPU, or an empty string if there is a tie."""
    address = _pci_address(gpu_uuid) if gpu_uuid else ""
    if not address:
        return ""
    gpu = _bridges(SYS / "bus/pci/devices" / address)
    shared = {}
    for name in _rdma_devices():
        theirs = _bridges(SYS / "class/infiniband" / name / "device")
        shared[name] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(gpu, theirs, strict=False)))
    most = max(shared.values(), default=0)
    nearest = [name for name, count in shared.items() if count == most]
    return nearest[0] if len(nearest) == 1 else ""


def _pci_address(gpu_uuid: str) -> str:
    # Use the driver's table, because CUDA's numbers differ from PCI's and depend on `CUDA_VISIBLE_DEVICES`.
    for information in sorted((PROC / "driver/nvidia/gpus").glob("*/information")):
        try:
            if gpu_uuid in information.read_text():
                return information.parent.name.lower()
        except OSError:
            continue
    return ""


def _bridges(device: Path) -> tuple[str, ...]:
    return Path(os.path.realpath(device)).parts[:-1]
