"""Byte sizes in the notations that people use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.config import Settings, environment, parse_bytes, runtime_dir
from penstock.errors import ConfigError
from penstock.types import GIB, MIB


def test_byte_sizes_accept_optional_units() -> None:
    assert [parse_bytes(text) for text in ("4096", "256M", " 1.5GiB ", "2kb", "0", 7)] == [
        4096,
        256 * MIB,
        3 * GIB // 2,
        2048,
        0,
        7,
    ]


@pytest.mark.parametrize("text", ["", "M", "lots", "nan", "inf", "1e400", "-5", "-1M", -1])
def test_invalid_byte_size_raises_config_error(text: str | int) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        parse_bytes(text)


def test_runtime_directory_avoids_foreign_owner(tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a directory to another user")
    taken = tmp_path / f"penstock-{os.geteuid()}"
    assert runtime_dir({}, shared=tmp_path) == taken, "nobody took it"
    taken.mkdir()
    os.chown(taken, 65534, 65534)
    found = runtime_dir({}, shared=tmp_path)
    assert found != taken and found.parent == tmp_path
    assert found.stat().st_uid == os.geteuid() and found.stat().st_mode & 0o777 == 0o700
    assert runtime_dir({}, shared=tmp_path) == found, "other processes of the same user use the same"
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_agree_on_oldest_runtime_directory(tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a directory to another user")
    usual = tmp_path / f"penstock-{os.geteuid()}"
    usual.symlink_to("/nowhere")
    os.chown(usual, 65534, 65534, follow_symlinks=False)
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: runtime_dir({}, shared=tmp_path), range(8)))
    decoy = tmp_path / f"penstock-{os.geteuid()}-00000000000000000000-decoy"
    decoy.mkdir(mode=0o700)
    os.chown(decoy, 65534, 65534)
    found = {runtime_dir({}, shared=tmp_path) for _ in range(3)}
    assert len(found) == 1 and found <= made


def test_configured_runtime_directory_is_never_replaced(tmp_path) -> None:
    assert runtime_dir({"PENSTOCK_RUNTIME_DIR": str(tmp_path / "mine")}, shared=tmp_path) == tmp_path / "mine"


def test_environment_is_shown_without_passwords() -> None:
    shown = {name: value for name, value, _ in environment({"PENSTOCK_REDIS_URL": "redis://u:secret@h:1/0?password=x"})}
    assert shown["PENSTOCK_REDIS_URL"] == "redis://h:1/0"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PENSTOCK_MEMORY_BYTES", "abc", "environment variable PENSTOCK_MEMORY_BYTES: 'abc' is not a number of bytes"),
        ("PENSTOCK_PROGRESS", "maybe", "environment variable PENSTOCK_PROGRESS: 'maybe' is neither on nor off"),
        ("PENSTOCK_RETRIES", "x", "environment variable PENSTOCK_RETRIES='x'"),
        ("PENSTOCK_STALL_S", "-1", "environment variable PENSTOCK_STALL_S=-1.0 must be positive"),
        ("PENSTOCK_FETCH_THREADS", "-2", "environment variable PENSTOCK_FETCH_THREADS=-2 must be 0 or more"),
    ],
)
def test_environment_error_names_variable(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.read({name: text})
    assert caught.value.message.startswith(message)


def test_argument_error_names_argument() -> None:
    with pytest.raises(ConfigError, match=r"^stall_s must be positive, not -1;"):
        Settings.read({"PENSTOCK_STALL_S": "5"}, stall_s=-1)
