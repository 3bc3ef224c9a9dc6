"""Columns as bytes: threads that decode side by side what none of them decoded before."""

import subprocess
import sys

DECODES = """
import sys, threading
from dataclasses import make_dataclass
from penstock.plan.columns import decode, encode

def turn():
    ready.wait()
    assert decode(raw, kind) == value

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = make_dataclass(f"Inner{number}", [("a", int), ("b", str)], frozen=True)
    kind = make_dataclass(f"Outer{number}", [("x", inner), ("y", list[inner]), ("z", tuple[inner, ...])], frozen=True)
    value = kind(x=inner(a=1, b="c"), y=[inner(a=2, b="d")], z=())
    raw, ready = encode(value), threading.Barrier(8)
    threads = [threading.Thread(target=turn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("decoded")
"""


def test_a_type_that_is_new_to_many_threads() -> None:
    done = subprocess.run([sys.executable, "-c", DECODES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr[-1000:]
