from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.hub.local_hub import LocalEndpoint, find_hub, own_address
from penstock.net.unix_sockets import RuntimeDir, host_id


@pytest.fixture(autouse=True)
def somewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    return path


def test_runtime_dir_is_private_and_temporary() -> None:
    directory = RuntimeDir.open()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert not directory.path.exists()


def test_only_directories_of_dead_processes_are_removed(somewhere: Path) -> None:
    code = (
        "from penstock.net.unix_sockets import RuntimeDir; import time; "
        "directory = RuntimeDir.open(); print(directory.path, flush=True); time.sleep(9)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        mine = RuntimeDir.open()
        assert path.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        third = RuntimeDir.open()
    assert not path.exists() and mine.path.exists()
    mine.close()
    third.close()


@pytest.mark.parametrize("name", ["members.lock", "generation", "hub-0.lock"])
def test_unusable_runtime_file_raises_config_error(somewhere: Path, name: str) -> None:
    (somewhere / name).mkdir()
    with pytest.raises(ConfigError, match="PENSTOCK_RUNTIME_DIR") as caught:
        endpoint = LocalEndpoint.open()
        try:
            endpoint.reach(1.0)
        finally:
            endpoint.close()
    assert caught.value.uri == str(somewhere)


@pytest.mark.parametrize(
    "place",
    [
        "/dev/null",
        "/dev/null/below",
        "{}/file",
        "{}/bytes\udcff",
        "{}/a space",
        "{}/é",
        "{}/new\nline",
        "{}/" + "x" * 256,
    ],
)
@pytest.mark.parametrize("use", [RuntimeDir.open, LocalEndpoint.open, find_hub, host_id, own_address])
def test_unusable_runtime_directory_raises_config_error(
    place: str, use: Callable[[], object], somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (somewhere / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", place.format(somewhere))
    with pytest.raises(ConfigError, match="PENSTOCK_RUNTIME_DIR"):
        use()


def test_special_characters_in_runtime_directory_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="p#%41?{}", dir="/tmp") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        with ps.cache.WeightCache() as keeper:
            assert find_hub() is not None and keeper.models() == []


def test_full_runtime_file_system_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(tmp_path).encode(), b"tmpfs", 0, b"mode=700,size=4096"):
        pytest.skip("mounting is not allowed here")
    try:
        (tmp_path / "in the way").write_bytes(b"x" * 4096)
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
        for verb in (lambda: ps.cache.WeightCache().__enter__(), lambda: LocalEndpoint.open().reach(1.0)):
            with pytest.raises(ConfigError, match=r"No space left.*PENSTOCK_RUNTIME_DIR"):
                verb()
    finally:
        libc.umount2(str(tmp_path).encode(), 2)
