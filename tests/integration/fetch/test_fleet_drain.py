"""The command drains a member of a real fleet: readers use other members, even after the hub lost its memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import penstock as ps
from penstock.testing.checkpoints import write_llama
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN, OPERATOR = "a-token-of-this-hub", "the-operator-of-this-hub"


def wait_until(reached: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def drain(url: str, tokens: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "penstock", "drain", *words, "--hub", url, "--token-file", str(tokens)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_readers_avoid_drained_member(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", total_bytes=4 << 20)
    # A command sends the first token in its file.
    for name, first in (("tokens", TOKEN), ("operator", f"{OPERATOR} @operator"), ("all", "")):
        (tmp_path / name).write_text(f"{first}\n" if first else f"{TOKEN}\n{OPERATOR} @operator\n")
    auth = Auth.of(token_file=tmp_path / "all")
    hub = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    hub.start()
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)

    def drained() -> list[str]:
        return [member.member for member in ps.hub.status(connection=connection).members if member.drain is not None]

    def silent_s() -> float:
        return next(m.silent_s for m in ps.hub.status(connection=connection).members if m.member == name)

    def source_of_a_new_reader() -> str:
        with ps.join("llama", connection=connection) as reader:
            return " ".join(reader.fetch({}).nbytes_by_path)

    with ps.join("llama", connection=connection) as first:
        first.fetch({}, fallback=tmp_path / "llama")
        (name,) = (member.member for member in ps.hub.status(connection=connection).members)
        with ps.join("llama", connection=connection) as second:
            second.fetch({})
            others = {member.member for member in ps.hub.status(connection=connection).members} - {name}
            refused = drain(hub.url, tmp_path / "tokens", name[:8])
            assert refused.returncode == 3 and "operator" in refused.stderr
            assert drain(hub.url, tmp_path / "operator", "0" * 8 + "x").returncode == 3
            ended = drain(hub.url, tmp_path / "operator", name[:8], "--reason", "a new driver")
            assert (ended.returncode, ended.stdout) == (0, f"{name} is draining\n"), ended.stderr
            assert drained() == [name]
            path = source_of_a_new_reader()
            assert next(iter(others))[:8] in path and name[:8] not in path
            before = silent_s()
            wait_until(lambda: silent_s() < before, "the member has sent a heartbeat, whose answer names the order")
            # The hub loses its memory, and the member's first heartbeat restores the order.
            port = hub.url.rpartition(":")[2]
            hub.stop()
            hub = HubThread(Directory(MemoryStore()), bind(f"127.0.0.1:{port}", auth), auth)
            hub.start()
            wait_until(lambda: drained() == [name], "the order is in force again")
            assert drain(hub.url, tmp_path / "operator", name, "--undo").returncode == 0
            assert drained() == []
        assert name[:8] in source_of_a_new_reader()
    hub.stop()
