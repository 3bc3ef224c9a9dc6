"""What every test may count on."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests assert behaviour, not time: on a busy machine an example of 50 ms took 260, above hypothesis's own deadline.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

# No test asks the real hub: those of hf:// turn this off, and name a server of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts pytest in the background has it ignore SIGINT, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_files = set[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what is there before a file's first test out of collections: thousands of tests, torch, transformers.

    Many tests collect garbage, to see memory go: each of these takes milliseconds then, not half a second.
    """
    if item.path not in _files:
        _files.add(item.path)
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Collect it all as the interpreter ends: some libraries report what is left of them then."""
    gc.unfreeze()


@pytest.fixture
def own_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub of its own: keepers of other tests on this host accept parameters, too."""
    with tempfile.TemporaryDirectory(prefix="pk-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield
        gc.collect()


@pytest.fixture
def refuse_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function after which no thread of a name can be started, as at the system's limit of threads."""
    start = threading.Thread.start

    def refuse_named(name: str) -> None:
        def start_others(thread: threading.Thread) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_others)

    return refuse_named
