"""The links of this host to other hosts, and which of them is nearest to a GPU, from what the kernel shows of PCI.

In: /sys, /proc, a GPU's UUID. Out: a count, a name; for the order of relays.
Not here: the choice of a link for a transfer, which is the transport's (UCX takes the nearest device too).
"""

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
    """Return the number of parallel links to other hosts: the RDMA devices if there are any, else one."""
    return max(1, len(_rdma_devices()))


def nearest_link(gpu_uuid: str) -> str:
    """Return the RDMA device that shares most bridges with a GPU; empty if there is none, or several are as near.

    Args:
        gpu_uuid: of a GPU of this host; empty: host memory, which is near no device.
    """
    address = _pci_address(gpu_uuid) if gpu_uuid else ""
    if not address:
        return ""
    gpu = _bridges(SYS / "bus/pci/devices" / address)
    shared = {name: _num_shared(gpu, _bridges(SYS / "class/infiniband" / name / "device")) for name in _rdma_devices()}
    most = max(shared.values(), default=0)
    nearest = [name for name, count in shared.items() if count == most]
    # Several: any of them may carry the bytes, so all that is known is how many the host has.
    return nearest[0] if len(nearest) == 1 else ""


def _pci_address(gpu_uuid: str) -> str:
    """Return the PCI address of a GPU, as `0000:1b:00.0`; empty: the driver does not say."""
    # By the driver's own table: CUDA numbers GPUs otherwise than PCI does, and `CUDA_VISIBLE_DEVICES` renumbers them.
    for information in sorted((PROC / "driver/nvidia/gpus").glob("*/information")):
        try:
            if gpu_uuid in information.read_text():
                return information.parent.name.lower()
        except OSError:
            continue
    return ""


def _bridges(device: Path) -> tuple[str, ...]:
    """Return the bridges above a PCI device, from the root complex down."""
    return Path(os.path.realpath(device)).parts[:-1]


def _num_shared(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """Return how many bridges from the root complex on two devices have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
