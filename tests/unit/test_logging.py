"""Loggers are Python's, below `penstock`. vLLM's handlers show Penstock's lines if no other handler does."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path

import pytest
from tests.support.sources import SOURCES

from penstock_vllm.plugin import LOGGER, vllm_logger

ROOT = Path(__file__).resolve().parents[2]


def names(source: str) -> list[str]:
    """Return the names of the loggers that a module uses. Loggers that it only inspects are assigned to `theirs`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) in {"logging.getLogger", "log_named"})
    return [ast.unparse(call.args[0]) for call in made if call.args]


def test_every_logger_is_under_penstock_and_documented() -> None:
    found = {
        name for root in SOURCES for path in root.rglob("*.py") for name in names(path.read_text(encoding="utf-8"))
    }
    texts = {name.strip("'") for name in found if name.startswith("'")}
    # The code inspects handlers of `vllm` and levels of `sglang`. `penstock storage-initializer` shows all messages
    # of this package.
    assert {name for name in texts if not name.startswith("penstock.")} == {"vllm", "sglang", "penstock"}
    docs = (ROOT / "docs" / "operate" / "tuning.md").read_text(encoding="utf-8")
    documented = texts - {"vllm", "sglang", "penstock", "penstock.hub.parser"}
    assert [name for name in sorted(documented | {LOGGER}) if f"`{name}`" not in docs] == []


def test_import_configures_no_handlers() -> None:
    assert not logging.getLogger("penstock").handlers


def test_vllm_log_handlers_show_penstock_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written, ours, theirs = io.StringIO(), logging.getLogger(LOGGER), logging.getLogger("vllm")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    assert not vllm_logger().logger.handlers  # vLLM is not configured.
    theirs.addHandler(logging.StreamHandler(written))
    theirs.setLevel(logging.INFO)
    vllm_logger().info("loaded")
    vllm_logger().info("again")
    assert written.getvalue() == "loaded\nagain\n"
