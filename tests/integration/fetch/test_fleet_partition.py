"""Two hosts whose link breaks in the middle of a transfer: members in namespaces, with `http`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.integration.conftest import SMALL_CHUNKS, assert_fetched
from tests.support.fleet import Task, Worker

TOKEN = "a-token-of-this-test"
CUT_S = 4.0
NEAR, FAR = "10.77.0.1", "10.77.0.2"


def run(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, timeout=30).returncode == 0


class Link:
    """Two network namespaces on one link. Their processes are in separate PID namespaces, as on two hosts."""

    def __init__(self) -> None:
        self.names = {NEAR: f"penstock-{os.getpid()}-near", FAR: f"penstock-{os.getpid()}-far"}

    def open(self) -> str:
        """Return why the test is not possible here, or "" if it is possible."""
        near, far = self.names.values()
        words = [
            ["ip", "netns", "add", near],
            ["ip", "netns", "add", far],
            ["ip", "link", "add", "pv0", "netns", near, "type", "veth", "peer", "name", "pv0", "netns", far],
        ]
        for address, name in self.names.items():
            words += [
                ["ip", "-n", name, "address", "add", f"{address}/24", "dev", "pv0"],
                ["ip", "-n", name, "link", "set", "lo", "up"],
                ["ip", "-n", name, "link", "set", "pv0", "up"],
            ]
        words.append([*self.on(FAR), "true"])
        failed = next((" ".join(command) for command in words if not run(*command)), "")
        return f"namespaces are not permitted: {failed}" if failed else ""

    def on(self, address: str) -> list[str]:
        """Return the command line that runs a command on that host."""
        return ["ip", "netns", "exec", self.names[address], "unshare", "--pid", "--fork", "--kill-child"]

    def cut(self) -> None:
        """Drop every packet, or disable the link if that is not possible."""
        near = self.names[NEAR]
        if not run("tc", "-n", near, "qdisc", "replace", "dev", "pv0", "root", "netem", "loss", "100%"):
            assert run("ip", "-n", near, "link", "set", "pv0", "down")

    def heal(self) -> None:
        near = self.names[NEAR]
        run("tc", "-n", near, "qdisc", "delete", "dev", "pv0", "root")
        assert run("ip", "-n", near, "link", "set", "pv0", "up")

    def close(self) -> None:
        for name in self.names.values():
            run("ip", "netns", "delete", name)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    try:
        reason = link.open()
        if reason:
            pytest.skip(reason)
        yield link
    finally:
        link.close()


def test_fetch_completes_after_network_partition(
    link: Link, small_checkpoint: Path, expected_tensors, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    hub = [sys.executable, "-m", "penstock.cli.main", "hub", "--listen", f"{NEAR}:7070", "--token-file", str(token)]

    def start(stack: ExitStack, address: str, **task: object) -> Worker:
        connection = {"token": TOKEN, "listen": f"{address}:0"}
        # Each host has its own runtime directory. With a common one they would be two containers on one host.
        environ = {"PENSTOCK_STALL_S": "15", "PENSTOCK_RUNTIME_DIR": str(tmp_path / address)}
        url = f"http://{NEAR}:7070"
        wanted = Task(hub=url, connection=connection, environ=environ, constants=SMALL_CHUNKS, **task)  # type: ignore[arg-type]
        return stack.enter_context(Worker(wanted, prefix=link.on(address)))

    with ExitStack() as stack:
        process = subprocess.Popen([*link.on(NEAR), *hub], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        holder = start(stack, NEAR, fallback=str(small_checkpoint), join={"max_bytes_per_s": 2 << 20})
        assert_fetched(holder, expected_tensors)
        near = start(stack, NEAR)
        far, farther = start(stack, FAR), start(stack, FAR, fallback=str(small_checkpoint))
        far.wait_for("joined")
        farther.wait_for("joined")
        time.sleep(1.0)
        link.cut()
        time.sleep(CUT_S)
        link.heal()
        assert_fetched(near, expected_tensors)
        paths = assert_fetched(far, expected_tensors)["paths"] | assert_fetched(farther, expected_tensors)["paths"]
        assert any(path == f"http <- {holder.events['joined']['member'][:8]}" for path in paths), paths
        assert far.events["fetched"]["seconds"] > CUT_S  # The transfer was running.
