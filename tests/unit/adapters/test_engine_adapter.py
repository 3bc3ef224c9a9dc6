"""The example of an adapter follows the rules of docs/extend/spi.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from penstock.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "engine_adapter.py"


@pytest.fixture
def example() -> ModuleType:
    """Return a new copy of the example whose engine has no registrations."""
    spec = importlib.util.spec_from_file_location("engine_adapter", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_engine_without_command_hook_still_loads(example: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    del example.Engine.handle
    for _ in range(2):
        example.register()
    assert len(caplog.messages) == 1 and example.UPDATES in caplog.text
    assert example.Loader({"fleet": "m"}).options == {"fleet": "m"}
    with pytest.raises(ConfigError, match="updates from a trainer"):
        example.Loader({"sync": "policy"})


def test_engine_without_loader_registry_starts(example: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    del example.Engine.LOADERS
    example.register()
    assert len(caplog.messages) == 1 and example.LOAD in caplog.text


def test_unknown_option_is_refused(example: ModuleType) -> None:
    with pytest.raises(ConfigError, match="no_such"):
        example.Loader({"no_such": 1})


def test_unrelated_commands_reach_engine(example: ModuleType) -> None:
    example.register()
    engine = example.Engine.__new__(example.Engine)
    with pytest.raises(ValueError, match="unknown command stop"):
        engine.handle("stop")
