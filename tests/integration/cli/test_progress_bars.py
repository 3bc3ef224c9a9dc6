"""Progress bars of long commands on a terminal show rate, total and time left, and end at 100 % or disappear."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fork_server import ForkServer
from tests.support.servers.http_server import Faults, RangeServer
from tests.support.terminal import Terminal

ENDED = re.compile(r"100 % of [\d.]+ [kMGT]?\w+(?:, [\d.]+ [kMG]?\w+/s, in [\d.:]+(?: s)?)?$")
RUNNING = re.compile(r"\d+ % of [\d.]+ [kMG]?B, [\d.]+ [kMG]?B/s, [\d.:]+( s)? left")

COMMANDS = {
    "load": "load {sealed}",
    "load, not verified": "load {sealed} --no-verify",
    "verify": "verify {sealed}",
    "manifest": "manifest {sealed} --out {tmp}/manifest",
    "fetch to files": "fetch m --to {tmp}/fetched --fallback {sealed}",
    "fetch to a device": "fetch m --device cpu --fallback {sealed}",
    "convert": "convert {sealed} {tmp}/out --to cast:F32 --devices cpu --workers 1 --task-bytes 1M",
    "convert, as json": "convert {sealed} {tmp}/out --devices cpu --workers 1 --format json",
    "bench load": "bench load {sealed} --repeat 2",
}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # `tmp_path` is too long, because the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pk-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


@pytest.mark.parametrize("name", COMMANDS)
def test_last_progress_bar_shows_100_percent(
    name: str, checkpoint_with_manifest: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    words = COMMANDS[name].format(sealed=checkpoint_with_manifest, tmp=tmp_path).split()
    with Terminal(columns=120) as terminal:
        terminal.fork(fork_server, words)
        assert terminal.end() == 0, terminal.text
        bars = [line for line in terminal.lines if "━" in line]
        assert bars and all(ENDED.search(line) for line in bars), terminal.text
        assert len(bars) == (3 if name == "bench load" else 1)


def test_processes_of_one_command_share_progress_bar(fork_server: ForkServer) -> None:
    with Terminal(columns=100) as terminal:
        terminal.fork(fork_server, ["bench", "fetch", "--total-gb", "0.001", "--receivers", "1", "--repeat", "2"])
        assert terminal.end() == 0, terminal.text
        (bar,) = [line for line in terminal.lines if "━" in line]
        assert bar.startswith("fetch ") and ENDED.search(bar) and "2 fetches" in bar


def test_keep_command_shows_progress_bar(checkpoint_with_manifest: Path, fork_server: ForkServer) -> None:
    with Terminal(columns=100) as terminal:
        terminal.fork(fork_server, ["cache", str(checkpoint_with_manifest), "--model", "m"])
        terminal.until(lambda: "Stop with SIGTERM or Ctrl-C" in terminal.text)
        (bar,) = [line for line in terminal.lines if "━" in line]
        assert bar.startswith("m ") and ENDED.search(bar)


@pytest.mark.parametrize("columns", [120, 60])
def test_running_load_shows_rate_and_remaining_time(
    columns: int, small_checkpoint: Path, fork_server: ForkServer
) -> None:
    faults = Faults(total_bytes_per_s=6_000_000)
    with RangeServer(small_checkpoint, faults=faults) as server, Terminal(columns=columns) as terminal:
        terminal.fork(
            fork_server,
            ["load", f"{server.url}/model.safetensors.index.json"],
            {"PENSTOCK_CHUNK_BYTES": "256K"},
        )
        terminal.until(lambda: RUNNING.search(terminal.text) is not None)
        assert len(terminal.lines) == 1 and ("━" in terminal.text) == (columns == 120)
        server.faults = Faults()
        assert terminal.end() == 0
        end = terminal.lines[0]
        assert ENDED.search(end if columns == 120 else end.partition("  ")[0]), terminal.text


def test_interrupt_clears_progress_bar(small_checkpoint: Path, fork_server: ForkServer) -> None:
    with RangeServer(small_checkpoint, faults=Faults(total_bytes_per_s=6_000_000)) as server, Terminal() as terminal:
        # Use small chunks, because an interrupted load waits for running reads.
        terminal.fork(
            fork_server, ["load", f"{server.url}/model.safetensors.index.json"], {"PENSTOCK_CHUNK_BYTES": "256K"}
        )
        terminal.until(lambda: "%" in terminal.text)
        terminal.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert terminal.lines == []


def test_progress_bar_counts_seconds_waiting_for_holder(fork_server: ForkServer) -> None:
    with Terminal() as terminal:
        terminal.fork(fork_server, ["fetch", "nobody-has-this", "--device", "cpu", "--timeout-s", "1.5"])
        terminal.until(lambda: "waiting for a holder, 1 of 2 s" in terminal.text)
        assert terminal.end() == 3
        # Before the bar, the log says what it waits for.
        assert any(line.startswith("penstock: NotFound: no member holds") for line in terminal.lines)
