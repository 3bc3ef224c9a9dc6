"""Connection settings: one object or a hub's address, completed from the environment when a verb runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

import penstock as ps
from penstock.errors import ConfigError
from penstock.hub.client import resolve_connection

TOKEN = "token-of-the-file-0123"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n{TOKEN} llama*\nanother-token-0123456\n")
    return path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_HUB", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)


def test_connection_string_sets_hub_address() -> None:
    assert ps.ConnectionSettings.of("https://hub:7070") == ps.ConnectionSettings(hub="https://hub:7070")
    assert ps.ConnectionSettings.of(None) == ps.ConnectionSettings()
    settings = ps.ConnectionSettings(hub="unix:///run/hub.sock", rack="a12")
    assert ps.ConnectionSettings.of(settings) is settings


def test_missing_environment_variables_select_local_hub() -> None:
    assert resolve_connection(None) == ps.ConnectionSettings(hub=None, token=None)


def test_environment_variables_fill_missing_settings(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    monkeypatch.setenv("PENSTOCK_HUB", "https://env:7070")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(token_file))
    assert resolve_connection(None) == ps.ConnectionSettings(hub="https://env:7070", token=TOKEN)
    rest = {"listen": "127.0.0.1:0", "rack": "a12", "transports": ["http"]}
    resolved = resolve_connection(ps.ConnectionSettings(**rest))
    assert resolved == ps.ConnectionSettings(hub="https://env:7070", token=TOKEN, **rest)


def test_argument_overrides_environment_per_field(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    monkeypatch.setenv("PENSTOCK_HUB", "https://env:7070")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(token_file))
    assert resolve_connection("https://mine:7070") == ps.ConnectionSettings(hub="https://mine:7070", token=TOKEN)
    mine = ps.ConnectionSettings(token="token-of-mine")
    assert resolve_connection(mine) == ps.ConnectionSettings(hub="https://env:7070", token="token-of-mine")


def test_overridden_connection_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HUB", "no-address")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", "/no/such/file")
    mine = ps.ConnectionSettings(hub="https://mine:7070", token="token-of-mine")
    assert resolve_connection(mine) == mine


@pytest.mark.parametrize(("name", "value"), [("PENSTOCK_HUB", "hub:7070"), ("PENSTOCK_TOKEN_FILE", "/no/such/file")])
def test_invalid_variable_error_names_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"environment variable {name}: .*{value}"):
        ps.hub.status()


def test_settings_repr_hides_token() -> None:
    settings = ps.ConnectionSettings(hub="https://hub:7070", token=TOKEN)
    assert TOKEN not in repr(settings) and "https://hub:7070" in repr(settings)
    assert settings != msgspec.structs.replace(settings, token=None)
    for token in (f"{TOKEN}\n", TOKEN.encode()):
        with pytest.raises(ConfigError) as caught:
            ps.ConnectionSettings(token=token)
        assert TOKEN not in str(caught.value)


def test_rich_repr_of_settings_hides_secrets() -> None:
    # rich reads another method than `repr` does, and prints the variables of a traceback with it.
    shown = pretty_repr(
        [ps.ConnectionSettings(rack="r1", token=TOKEN), ps.ReadSettings(storage_options={"key": TOKEN})]
    )
    assert TOKEN not in shown and "storage_options" not in shown and "r1" in shown


def test_connection_settings_are_immutable_and_hashable() -> None:
    settings = ps.ConnectionSettings(hub="https://hub:7070", token=TOKEN, transports=["shm", "http"])
    assert settings.transports == ("shm", "http")
    assert len({settings, copy.deepcopy(settings)}) == 1
    with pytest.raises(AttributeError):
        settings.hub = None


@pytest.mark.parametrize(
    "fields",
    [
        {"hub": 3},
        {"hub": ""},
        {"hub": "hub:7070"},
        {"hub": "http://"},
        {"hub": "https://:7070"},
        {"hub": "http://hub:99999"},
        {"hub": "http://hub:port"},
        {"token": 3},
        {"token": ""},
        {"token": "of two words"},
        {"token": "of-a-file\n"},
        {"listen": 7071},
        {"listen": ""},
        {"rack": None},
        {"rack": 12},
        {"transports": "shm"},
        {"transports": [3]},
        {"transports": 3},
        {"stall_s": "10"},
        {"stall_s": 0},
        {"stall_s": -1.0},
        {"transports": []},
        {"transports": ()},
    ],
    ids=str,
)
def test_wrong_setting_value_raises_config_error_with_hint(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ps.ConnectionSettings(**fields)
    assert next(iter(fields)) in caught.value.message and caught.value.hint


@pytest.mark.parametrize("connection", [3, b"https://hub:7070", {"hub": None}, ["https://hub:7070"]])
def test_wrong_connection_type_raises_config_error(connection: Any) -> None:
    with pytest.raises(ConfigError, match="connection is"):
        ps.join("m", connection=connection)


def test_token_file_is_read_at_call_time(tmp_path: Path, token_file: Path) -> None:
    settings = ps.ConnectionSettings(hub="https://mine:7070", token_file=token_file)
    assert resolve_connection(settings) == ps.ConnectionSettings(hub="https://mine:7070", token=TOKEN)
    assert TOKEN not in repr(settings)
    token_file.write_text("a-newer-token-0123456789\n")
    assert resolve_connection(settings).token == "a-newer-token-0123456789"
    absent = ps.ConnectionSettings(token_file=str(tmp_path / "none"))
    for call in (lambda: ps.hub.status(connection=absent), lambda: ps.join("m", connection=absent)):
        with pytest.raises(ConfigError, match=r"cannot read token file .*none: there is no such file"):
            call()


def test_token_file_setting_overrides_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token_file: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "none"))
    assert resolve_connection(ps.ConnectionSettings(token_file=token_file)).token == TOKEN


@pytest.mark.parametrize(
    "fields",
    [
        {"token": TOKEN, "token_file": "tokens"},
        {"token_file": 7},
        {"data_port": 7072},
        {"listen": "127.0.0.1:7071", "data_port": 7071},
        {"listen": "127.0.0.1:7071", "data_port": 65536},
        {"listen": "127.0.0.1:7071", "data_port": -1},
        {"listen": "127.0.0.1:7071", "data_port": "7072"},
        {"listen": "127.0.0.1:7071", "data_port": True},
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ps.ConnectionSettings(**fields)
