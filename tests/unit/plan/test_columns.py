"""Columns as bytes: several threads decode a type for the first time at the same moment."""

import subprocess
import sys

import pytest

DECODES = """
import sys, threading
import msgspec
from penstock.errors import FormatError
from penstock.plan.layout import decode
from penstock.plan.{module} import {kind}

def turn():
    ready.wait()
    try:
        decode(raw, {kind})
    except FormatError:
        found.append(1)

raw, ready, found = msgspec.msgpack.encode(dict(zip("abc", range(3)))), threading.Barrier(16), []
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=turn) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found))
"""


@pytest.mark.parametrize(("module", "kind"), [("layout", "Layout"), ("sync", "ReceiverPlan")])
def test_concurrent_first_decodes_of_type_raise_format_error(module: str, kind: str) -> None:
    script = DECODES.format(module=module, kind=kind)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr[-1000:]
