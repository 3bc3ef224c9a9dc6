from __future__ import annotations

import subprocess
import sys

CODE = """
import inspect
import msgspec, msgspec._utils
from penstock.holding import weight_layout
from penstock.hub import messages
from penstock.sync import messages as sync_messages

modules = messages, sync_messages
kinds = [kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)]
kinds = [kind for kind in kinds if issubclass(kind, msgspec.Struct)] + [weight_layout.TableMessage]


def late(obj):
    raise RuntimeError("msgspec looks at a type only now")


msgspec._utils.get_class_annotations.__code__ = late.__code__
for kind in kinds:
    try:
        msgspec.msgpack.decode(b"\\x80", type=kind)
    except msgspec.ValidationError:
        pass
print(len(kinds))
"""


def test_concurrent_first_decodes_of_messages_succeed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and int(done.stdout) > 20, (done.returncode, done.stderr)
