"""Text from other programs is escaped in the log, in one place that every line of the package passes."""

from __future__ import annotations

import ast
import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.sources import SOURCES

from penstock.logs import Log, log_named
from penstock.report import Summarised

ESCAPE, FORGED = "\x1b[2J", "a\n2026-01-01 penstock.audit event=used"
LOGGERS = frozenset({"log", "_log", "logger", "_logger", "_LOGGER", "audit", "vllm_logger", "sglang_logger"})
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
CONFIGURE = frozenset(
    {
        "logs.py",
        "penstock_hub/command.py",
        "cli/initialize.py",
        "penstock_hub/connection.py",
        "penstock_vllm/plugin.py",
        "penstock_sglang/plugin.py",
    }
)
"""Files that set handlers and levels of loggers, and log nothing themselves."""
WRITE = frozenset({"cli/terminal.py", "cli/main.py", "penstock_hub/command.py", "penstock_hf/startup/sitecustomize.py"})
"""Files that write to the terminal: escaped text, help, the hub's address, or why a program runs without Penstock."""


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "penstock.test")
    return log_named("penstock.test")


@pytest.mark.parametrize(
    "value", [ESCAPE, FORGED, Path(FORGED), OSError(ESCAPE), ValueError(FORGED), [ESCAPE], "\u202e"]
)
@pytest.mark.parametrize("message", ["name %s", "name %r"])
def test_logged_foreign_text_stays_on_one_line(
    log: Log, caplog: pytest.LogCaptureFixture, value: object, message
) -> None:
    log.warning(message, value)
    (line,) = lines_of(caplog)
    assert line.isprintable() and line.startswith("name ")


def test_log_text_is_escaped_once(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.info("%s %r %s %r", "a\tb", "a\tb", r"a\tb", "é")
    assert lines_of(caplog) == [r"a\tb 'a\tb' a\tb 'é'"]


def test_logged_numbers_keep_their_format(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.info("%d %.2f %g %s", 3, 0.5, 2.0, None)
    assert lines_of(caplog) == ["3 0.50 2 None"]


def test_report_lines_are_indented_in_log(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Report(Summarised):
        def summary(self) -> str:
            return f"two lines\n{FORGED}{ESCAPE}"

    log.info("done: %s", Report())
    first, *others = lines_of(caplog)[0].split("\n")
    assert first == "done: two lines" and len(others) == 2
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_log_record_names_caller_and_drops_arguments(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    class Argument:
        pass

    argument = Argument()
    kept = weakref.ref(argument)
    log.warning("%s", argument)
    log.error("%r", argument)
    del argument
    gc.collect()
    assert kept() is None
    assert {record.filename for record in caplog.records} == {Path(__file__).name}
    assert {record.funcName for record in caplog.records} == {"test_log_record_names_caller_and_drops_arguments"}


def read(file: str) -> str:
    """Return the source of a file from `calls`."""
    return next(
        path for root in SOURCES for path in (root / file, root / "penstock" / file) if path.exists()
    ).read_text()


def calls() -> Iterator[tuple[str, ast.Call]]:
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield path.relative_to(root).as_posix().removeprefix("penstock/"), node


def name_of(node: ast.expr) -> str:
    """Return the last name of `log`, `self.log`, `store.log` or `vllm_logger()`."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_raw_loggers_are_created_only_in_listed_files() -> None:
    found = {file for file, call in calls() if name_of(call) == "getLogger"}
    assert found == CONFIGURE
    raw = [
        (file, call.lineno)
        for file, call in calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and ast.unparse(call.func.value).startswith("logging")
    ]
    assert not raw


def test_every_log_message_is_literal() -> None:
    """Text that is formatted into the message itself would not be escaped."""
    lines = [
        (file, call)
        for file, call in calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS and name_of(call.func.value) in LOGGERS
    ]
    assert len(lines) > 70
    composed = [(file, call.lineno) for file, call in lines if not isinstance(call.args[0], ast.Constant | ast.Name)]
    assert not composed
    # A name may stand for a literal in the same file.
    named = [(file, call.args[0].id) for file, call in lines if isinstance(call.args[0], ast.Name)]
    for file, name in named:
        values = [
            node.value
            for node in ast.walk(ast.parse(read(file)))
            if isinstance(node, ast.Assign) and any(name_of(target) == name for target in node.targets)
        ]
        used = [value for value in values if isinstance(value, ast.Constant)]
        assert used, (file, name)


def test_only_listed_files_write_to_terminal() -> None:
    found = {
        file
        for file, call in calls()
        if ast.unparse(call.func) in {"print", "sys.stdout.write", "sys.stderr.write", "typer.echo", "click.echo"}
    }
    assert {file for file in found if not file.startswith("testing/")} == WRITE
