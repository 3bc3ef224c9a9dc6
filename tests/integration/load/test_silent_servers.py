"""A program that is interrupted while it waits for a silent server exits at once, without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from tests.support.servers.http_server import Faults, RangeServer

ANSWER_S = 3.0
"""Longest time from the signal to the end of a call. It is far below its deadline of 30 s, even on a loaded machine."""

CHILD = """
import signal, sys, threading, time
import torch
import penstock as ps

def raise_it(*_):
    raise TimeoutError("of the program")

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, raise_it)
number = getattr(signal, sys.argv[1])

def safe_open(uri):
    with ps.safe_open(uri, "pt") as file:
        file.get_tensor("a")

verbs = {
    "load": ps.load,
    "load_into": lambda uri: ps.load_into({"a": torch.zeros(1 << 20)}, uri),
    "stream": lambda uri: list(ps.stream(uri)),
    "inspect": ps.inspect,
    "safe_open": safe_open,
}
for call in sys.argv[2:]:
    verb, _, uri = call.partition("=")
    sent = []
    def send():
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, number)
    sender = threading.Timer(0.4, send)
    sender.start()
    try:
        verbs[verb](uri)
        error_name = "it returned"
    except (KeyboardInterrupt, TimeoutError) as error:
        error_name = type(error).__name__
    except ps.PenstockError as error:
        error_name = repr(error)
    took_s = time.monotonic() - sent[0] if sent else -1.0
    sender.join()
    print(call, error_name, took_s, sep="\\t", flush=True)
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def require_soon(number: str, error_name: str, calls: list[str], env: dict[str, str] | None = None) -> None:
    """Run verbs that wait for ever one by one, and send a signal to each."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, number, *calls],
        env=os.environ | {"PENSTOCK_STALL_S": "30", "PENSTOCK_PROGRESS": "0"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    ends = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(call, how) for call, how, _ in ends] == [(call, error_name) for call in calls], done.stderr
    assert all(0 <= float(took_s) < ANSWER_S for _, _, took_s in ends), ends


@pytest.mark.parametrize(("number", "error_name"), [("SIGINT", "KeyboardInterrupt"), ("SIGALRM", "TimeoutError")])
def test_signal_aborts_wait_for_response(silent: str, number: str, error_name: str) -> None:
    require_soon(number, error_name, [f"{verb}={silent}/m.safetensors" for verb in ("load", "inspect", "safe_open")])


def test_interrupt_aborts_wait_for_weights() -> None:
    data = save({"a": torch.arange(1 << 20, dtype=torch.float32)})
    # The server sends the header and then pauses in the middle of the weights.
    with RangeServer({"m.safetensors": data}, faults=Faults(stall_after=200_000)) as server:
        verbs = ("load", "load_into", "stream", "safe_open")
        require_soon("SIGINT", "KeyboardInterrupt", [f"{verb}={server.url}/m.safetensors" for verb in verbs])


def test_interrupt_aborts_waits_inside_libraries(silent: str, tmp_path: Path) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_ENDPOINT_URL": silent,
        "GOOGLE_BASE_URL": silent,
        "GOOGLE_SKIP_SIGNATURE": "true",
        "HF_ENDPOINT": silent,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    uris = ["s3://b/m/", "s3://b/m.safetensors", "gs://b/m.safetensors", "hf://org/name"]
    require_soon("SIGINT", "KeyboardInterrupt", [f"load={uri}" for uri in uris], env)


LEFT_OPEN = """
import atexit, gc, os, sys

def memories():
    # The shared memory of this process, by descriptor.
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            links[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass
    return {fd: link for fd, link in links.items() if "memfd:penstock" in link}

def last():
    # Python has run its finalizers, while other threads still serve and need their resources.
    publisher.publish(2)
    subscriber.update()
    print(subscriber.version, bool(before), before.items() <= memories().items())

# Register this before any finalizer, because handlers run in reverse order.
atexit.register(last)

import torch
import penstock as ps

publisher = ps.publisher("left", {"a": torch.ones(4)}, mode="snapshot")
publisher.publish(1)
subscriber = ps.subscriber("left", {"a": torch.zeros(4)})
subscriber.update()
holder = ps.join("m")
holder.fetch({}, fallback=sys.argv[1])
with ps.join("m", connection=ps.ConnectionSettings(transports=["shm"])) as reader:
    reader.fetch({}, timeout_s=5)
del reader
gc.collect()
before = memories()
"""


def test_program_with_unclosed_readers_exits_silently(tmp_path: Path) -> None:
    env = os.environ | {"PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    program = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "m.safetensors")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 True True\n", "")
