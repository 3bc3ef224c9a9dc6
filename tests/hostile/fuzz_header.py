"""Coverage-guided fuzzing of the header, index and manifest parsers: `python fuzz_header.py -max_total_time=60`.

In: bytes from atheris; libFuzzer's arguments are passed on. Out: exit status 0, or the input that broke a promise.
Not here: attacks by table and by Hypothesis (`test_header_attacks`, `test_gguf_attacks`).

The promises: nothing but a PenstockError is raised; what the safetensors library accepts and the format's text allows
is accepted, with the same tensors; what we accept, it accepts. Of GGUF: the tensors that are accepted lie in the file,
and none overlaps another.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import tempfile
from pathlib import Path
from types import FunctionType

import safetensors

from penstock.errors import FormatError, PenstockError
from penstock.storage import MemorySource, headers, manifest
from penstock.storage.gguf import GgufHeader
from penstock.storage.headers import GGUF_MAGIC as GGUF
from penstock.storage.safetensors import parse_index, read_header
from penstock_convert.operations.gguf_header import Info, encode_header, number_field, text_field

BODY = bytes(64)
WORDS = (
    "data_offsets",
    "shape",
    "dtype",
    "__metadata__",
    "weight_map",
    "\\\\u0061",
    "null",
    "F6_E2M3",
    "BOOL",
    "[0,0]",
    "{}",
)
SEEDS = (
    b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F4","shape":[80],"data_offsets":[24,64]}}',
    b'{"__metadata__":{"k":"{\\"x\\":1}"},"z":{"dtype":"U8","shape":[0,9],"data_offsets":[0,0]}}',
    b'{"weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors"},"metadata":{"total_size":1}}',
    encode_header(
        [text_field("general.architecture", "llama"), number_field("general.alignment", 32)],
        [Info("a", 8, (2, 32), 0), Info("b", 0, (3,), 96)],
    )[8:]
    + bytes(128),
)


def stricter(raw: bytes) -> bool:
    """Whether we refuse on purpose what the library takes: see the format's text, and what array libraries hold."""
    repeated = False

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal repeated
        repeated |= len(dict(pairs)) < len(pairs)
        return dict(pairs)

    header = json.loads(raw, object_pairs_hook=look)
    entries = [entry for entry in header.values() if isinstance(entry, dict) and isinstance(entry.get("shape"), list)]
    arrays = any(isinstance(entry, list) for entry in header.values())
    unheld = any(len(entry["shape"]) > 64 or max(entry["shape"], default=0) >= 2**31 for entry in entries)
    return repeated or arrays or unheld or not raw.startswith(b"{")


def check_header(raw: bytes) -> None:
    data = struct.pack("<Q", len(raw)) + raw + BODY
    try:
        theirs = {name: (row["dtype"], row["shape"]) for name, row in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        theirs = None
    try:
        table = read_header(MemorySource(data)).tensors
    except PenstockError:
        if theirs is not None and not stricter(raw):
            raise AssertionError(f"refused, though valid: {raw!r}") from None
        return
    ours = {n: (d.value, list(s)) for n, d, s in zip(table.names, table.dtypes, table.shapes, strict=True)}
    # "-0" is an integer of JSON, and a float to the library; unknown fields are walked deeper here than there.
    if theirs != ours and not (theirs is None and (b"-0" in raw or raw.count(b"[") + raw.count(b"{") > 120)):
        raise AssertionError(f"accepted otherwise than by the library: {raw!r}")


def check_gguf(data: bytes) -> None:
    # Without the magic and version in the input, few mutations would get past them.
    raw = GGUF + struct.pack("<I", 3) + data
    try:
        header = headers.read_header(MemorySource(raw))
    except PenstockError:
        return
    assert isinstance(header, GgufHeader), raw
    ends = [(start, start + nbytes) for start, nbytes in zip(header.tensors.offset, header.tensors.nbytes, strict=True)]
    at = header.data_offset
    for start, stop in ends:
        if not at <= start <= stop <= len(raw):
            raise AssertionError(f"accepted with a tensor at [{start}, {stop}): {raw!r}")
        at = stop


def check(data: bytes) -> None:
    """One input, through every parser."""
    check_header(data)
    check_gguf(data)
    with contextlib.suppress(PenstockError):
        read_header(MemorySource(data))
    with contextlib.suppress(FormatError):
        parse_index(data, uri="mem:index")
    for raw in (data, manifest.MAGIC + data):
        with contextlib.suppress(PenstockError):
            manifest.decode(raw, uri="mem:manifest")


def main() -> None:
    """Run until libFuzzer's limits are reached."""
    import atheris

    for name, module in list(sys.modules.items()):
        if name.startswith("penstock."):
            for function in vars(module).values():
                if getattr(function, "__module__", None) == name and isinstance(function, FunctionType):
                    atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate(SEEDS):
            check(seed)
            (Path(folder) / str(index)).write_bytes(seed)
        words = Path(folder) / "words.dict"
        words.write_text("".join(f'"{word}"\n' for word in WORDS))
        atheris.Setup([*sys.argv, f"-dict={words}", folder], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
