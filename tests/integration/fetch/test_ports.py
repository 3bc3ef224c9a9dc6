"""The ports of a member: both can be pinned, in Python and by the command, and no third port is opened."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.compare import assert_same, by_safetensors
from tests.support.processes import listening_ports

import penstock as ps
from penstock.testing.checkpoints import write_llama


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="pp-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    write_llama(tmp_path / "llama", total_bytes=1 << 20, fp8=False)
    return str(tmp_path / "llama")


@pytest.fixture
def two_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def test_reader_uses_pinned_ports(llama: str, two_ports: tuple[int, int]) -> None:
    control, data = two_ports
    pinned = ps.ConnectionSettings(listen=f"127.0.0.1:{control}", data_port=data)
    with ps.join("m", connection=pinned) as holder:
        holder.fetch({}, fallback=llama)
        with socket.create_connection(("127.0.0.1", data), timeout=5):
            pass
        received: dict[str, object] = {}
        with ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as reader:
            report = reader.fetch(received, timeout_s=5)
        assert report.storage_bytes == 0 and any(path.startswith("http") for path in report.nbytes_by_path)
        assert_same(received, by_safetensors(Path(llama)))


def test_occupied_data_port_error_names_port(two_ports: tuple[int, int]) -> None:
    control, data = two_ports
    with socket.create_server(("127.0.0.1", data)), pytest.raises(ps.ConfigError, match=f"127.0.0.1:{data}"):
        ps.join("m", connection=ps.ConnectionSettings(listen=f"127.0.0.1:{control}", data_port=data))


def test_cache_listens_on_its_two_ports_only(llama: str, two_ports: tuple[int, int]) -> None:
    control, data = two_ports
    command = [sys.executable, "-m", "penstock", "cache", llama, "--listen", f"127.0.0.1:{control}"]
    command += ["--data-port", str(data), "--max-readers", "2", "--max-bytes-per-s", "50M"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stderr is not None
        try:
            assert "Stop with SIGTERM or Ctrl-C" in keeper.stderr.readline()
            assert sorted(listening_ports(keeper.pid)) == sorted(two_ports)
            [member] = ps.hub.status("llama").members
            assert [holding.max_readers for holding in member.holdings] == [2]
        finally:
            keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(20) == 0
