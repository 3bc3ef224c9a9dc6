"""Options for a fleet in an engine's extra configuration, and the fallback if the hub is away."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import penstock.fetcher.join as fleet_join
from penstock.errors import ConfigError, HubUnavailable
from penstock.spi.engine_weights import FleetOptions, join, read_options

HUB = "http://hub:7070"


def test_missing_fleet_variable_returns_no_options() -> None:
    assert FleetOptions.read({}, "llama") is None
    assert FleetOptions.read({"memory_bytes": 1, "hub": None}, "llama") is None


def test_every_fleet_option_is_read() -> None:
    found = FleetOptions.read({"fleet": "l", "hub": HUB, "max_bytes_per_s": "2G", "serve": False}, "s3://b/other")
    assert found == FleetOptions(fleet="l", hub=HUB, max_bytes_per_s=2 << 30, serve=False)


def test_hub_option_alone_selects_fleet_of_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for model in ("org/llama", "s3://bucket/llama/", "/models/llama", "hf://org/llama"):
        assert FleetOptions.read({"hub": HUB}, model) == FleetOptions(fleet="llama", hub=HUB)
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path / "llama")
    assert FleetOptions.read({"hub": HUB}, ".") == FleetOptions(fleet="llama", hub=HUB)
    monkeypatch.setenv("PENSTOCK_HUB", HUB)
    # The address itself is parsed when the hub is contacted.
    assert FleetOptions.read({}, "org/llama") == FleetOptions(fleet="llama")
    assert FleetOptions.read({"serve": False}, "org/llama") == FleetOptions(fleet="llama", serve=False)
    assert FleetOptions.read({"fleet": False}, "org/llama") is None
    assert FleetOptions.read({"distributed": True}, "org/llama") is None
    assert read_options({"distributed": True}) == {"distributed": True}


@pytest.mark.parametrize(
    "extra",
    [
        {"serve": True},
        {"fleet": True},
        {"fleet": ""},
        {"fleet": 3},
        {"fleet": "m", "serve": 1},
        {"fleet": "m", "listen": 7071},
        {"fleet": "m", "max_bytes_per_s": "much"},
    ],
)
def test_invalid_fleet_option_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FleetOptions.read(extra, "llama")


def test_missing_token_file_is_refused(tmp_path: Path) -> None:
    options = FleetOptions(fleet="m", hub=HUB, token_file=str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="cannot read token file"):
        join(options, "/m", log=logging.getLogger("engine"))


def test_unavailable_hub_falls_back_to_storage(monkeypatch, caplog) -> None:
    def away(*_: object, **__: object) -> object:
        raise HubUnavailable("nobody listens", uri="http://hub:7070")

    monkeypatch.setattr(fleet_join, "join", away)
    with caplog.at_level(logging.WARNING):
        found = join(FleetOptions(fleet="llama"), ["/m/a.safetensors", "/m/b"], log=logging.getLogger("engine"))
    assert found is None
    assert "fleet llama" in caplog.text
    assert "storage (2 files, /m/a.safetensors first)" in caplog.text
    assert "nobody listens" in caplog.text


def test_only_rank_zero_uses_configured_port(monkeypatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fleet_join, "join", lambda name, **given: asked.append(given))
    options = FleetOptions(fleet="m", listen="10.0.0.7:7071")
    for rank in (0, 1):
        join(options, "/m", log=logging.getLogger("engine"), rank=rank, memory_bytes=1 << 20)
    assert [given["connection"].listen for given in asked] == ["10.0.0.7:7071", "10.0.0.7:0"]
    assert asked[0]["memory_bytes"] == 1 << 20
