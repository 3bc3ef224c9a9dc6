"""Record the fixtures that are missing: `python -m tests.wire.record`.

In: the tables of `messages` and `frames`. Out: an entry in `fixtures/ROOM.json` for each name that has none.
An entry that is there is never changed: its bytes are what other releases send. One that is in no table is an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.wire.frames import FRAMES
from tests.wire.messages import CODECS, MESSAGES, resolve
from tests.wire.samples import plain, sample

FIXTURES = Path(__file__).parent / "fixtures"
Entry = dict[str, Any]


def read_fixtures() -> dict[str, Entry]:
    """Return every entry: `value` as JSON has it, and its bytes as `text` or in `hex`."""
    return {
        name: entry for path in sorted(FIXTURES.glob("*.json")) for name, entry in json.loads(path.read_text()).items()
    }


def wire_of(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    return entry["text"].encode() if "text" in entry else bytes.fromhex(entry["hex"])


def _entry(value: Any, raw: bytes) -> Entry:
    return (
        {"value": value, "text": raw.decode()} if raw.startswith((b"{", b"[")) else {"value": value, "hex": raw.hex()}
    )


def _message(name: str) -> Entry:
    value = sample(resolve(MESSAGES[name]))
    return _entry(plain(value), CODECS[name.rpartition("/")[2]].encode(value))


def _frame(name: str) -> Entry:
    raw = FRAMES[name].write()
    return _entry(FRAMES[name].read(raw), raw)


def main() -> int:
    """Add what is missing."""
    known = read_fixtures()
    if unknown := sorted(known.keys() - MESSAGES.keys() - FRAMES.keys()):
        print(f"fixtures of no message: {', '.join(unknown)}", file=sys.stderr)
        return 1
    new = {name: _message(name) for name in MESSAGES if name not in known}
    new |= {name: _frame(name) for name in FRAMES if name not in known}
    for room in sorted({name.partition(".")[0] for name in new}):
        path = FIXTURES / f"{room}.json"
        entries = json.loads(path.read_text()) if path.exists() else {}
        entries |= {name: entry for name, entry in new.items() if name.partition(".")[0] == room}
        path.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
    print(f"recorded {len(new)}: {' '.join(new)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
