"""The audit log: private files of limited size, at a limited rate for each caller."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.hub.auth import MAX_NAMES, RateLimit
from penstock_hub import audit


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    made = logging.getLogger("penstock.audit.test")
    made.setLevel(logging.INFO)
    made.propagate = False
    yield made
    for handler in list(made.handlers):
        made.removeHandler(handler)


def log_lines(log: logging.Logger, caller: str, *lines: str) -> None:
    def write_line() -> None:
        audit.CALLER.set(caller)
        for line in lines:
            log.info(line)

    contextvars.copy_context().run(write_line)


def test_caller_flooding_audit_log_does_not_hide_other_callers(log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "LINES_PER_S", 0.0)
    monkeypatch.setattr(audit, "LINES_AT_ONCE", 3)
    handler = audit.audit_handler(tmp_path / "audit.log")
    log.addHandler(handler)
    log_lines(log, "token:loop", *(f"event=refused n={i}" for i in range(50)))
    log_lines(log, "token:quiet", "event=used")
    handler.close()
    lines = [line.split(" ", 3)[3] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert lines == [
        "event=refused n=0", "event=refused n=1", "event=refused n=2", "event=used",
        "event=left_out caller=token:loop lines=47",
    ]  # fmt: skip


def test_client_flooding_audit_log_does_not_hide_other_clients(log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "STRANGER_LINES_PER_S", 0.0)
    monkeypatch.setattr(audit, "STRANGER_LINES_AT_ONCE", 2)
    handler = audit.audit_handler(tmp_path / "audit.log")
    log.addHandler(handler)
    log_lines(log, audit.stranger("192.0.2.1"), *(f"event=unauthorized n={i}" for i in range(20)))
    log_lines(log, audit.stranger("192.0.2.2"), "event=unauthorized other")
    handler.close()
    lines = [line.split(" ", 3)[3] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert "event=unauthorized other" in lines and "event=unauthorized n=2" not in lines
    assert "event=left_out caller=stranger lines=18" in lines


def test_audit_files_are_private_and_size_limited(log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES", 10_000)
    handler = audit.audit_handler(tmp_path / "audit.log")
    log.addHandler(handler)
    log_lines(log, "token:a", *(f"event=used n={i} {'x' * 100}" for i in range(1_000)))
    handler.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + audit.NUM_OLD_FILES
    assert all(file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size <= 10_000 for file in files)
    assert "n=999 " in (tmp_path / "audit.log").read_text()


def test_unwritable_audit_file_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the audit log"):
        audit.audit_handler(tmp_path / "none" / "audit.log")


def test_audit_rate_limit_refills_for_limited_number_of_callers() -> None:
    now = 0.0
    limit = RateLimit(2.0, 4.0, clock=lambda: now)
    assert [limit.allow("a") for _ in range(6)] == [True] * 4 + [False] * 2
    now = 1.0
    assert [limit.allow("a") for _ in range(3)] == [True, True, False]
    for number in range(MAX_NAMES + 10):
        limit.allow(f"n{number}")
    assert len(limit._buckets) == MAX_NAMES
