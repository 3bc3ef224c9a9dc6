"""The nearest link of a GPU by common PCI bridges, with directories in place of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.peer import host_links


class Host:
    """Directories like the kernel's PCI tree, such as `root/bridge/.../address`."""

    def __init__(self, directory: Path) -> None:
        self.sys, self.proc = directory / "sys", directory / "proc"

    def _device(self, place: str) -> Path:
        path = self.sys / "devices" / place
        path.mkdir(parents=True)
        return path

    def gpu(self, place: str, uuid: str) -> None:
        device = self._device(place)
        by_address = self.sys / "bus/pci/devices"
        by_address.mkdir(parents=True, exist_ok=True)
        (by_address / device.name).symlink_to(device)
        information = self.proc / "driver/nvidia/gpus" / device.name / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{uuid}\n")

    def nic(self, place: str, name: str) -> None:
        link = self.sys / "class/infiniband" / name
        link.mkdir(parents=True)
        (link / "device").symlink_to(self._device(place))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    fake = Host(tmp_path)
    monkeypatch.setattr(host_links, "SYS", fake.sys)
    monkeypatch.setattr(host_links, "PROC", fake.proc)
    return fake


def test_gpus_behind_one_switch_share_its_nic(host: Host) -> None:
    for i in range(4):
        root = f"pci0000:{i}0/0000:{i}0:01.0"
        host.nic(f"{root}/0000:{i}1:00.0/0000:{i}2:00.0", f"mlx5_{i}")
        for k in (1, 2):
            host.gpu(f"{root}/0000:{i}1:0{k}.0/0000:{i}3:0{k}.0", f"uuid-{i}-{k}")
    assert host_links.host_links() == 4
    for i in range(4):
        assert [host_links.nearest_link(f"uuid-{i}-{k}") for k in (1, 2)] == [f"mlx5_{i}"] * 2


def test_gpu_with_equally_near_nics_has_no_nearest_link(host: Host) -> None:
    host.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", "uuid")
    host.nic("pci0000:20/0000:20:01.0/0000:21:00.0", "mlx5_0")
    host.nic("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_1")
    assert host_links.nearest_link("uuid") == ""


def test_unknown_gpu_returns_no_link(host: Host) -> None:
    assert (host_links.host_links(), host_links.nearest_link("uuid")) == (1, "")
    host.gpu("pci0000:10/0000:11:00.0", "uuid")
    assert (host_links.host_links(), host_links.nearest_link("uuid")) == (1, "")
    host.nic("pci0000:10/0000:12:00.0", "mlx5_0")
    assert (host_links.host_links(), host_links.nearest_link("uuid")) == (1, "mlx5_0")
    assert host_links.nearest_link("") == "" and host_links.nearest_link("another") == ""
