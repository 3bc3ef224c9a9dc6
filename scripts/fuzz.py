"""`make fuzz`: coverage-guided fuzzing of what reads bytes from strangers: headers, indexes, manifests.

In: seconds, targets. Out: "no fault found", or libFuzzer's report and exit 1 when a parser raises anything
but `FormatError` or `IntegrityError`, takes over a second, or accepts a header that safetensors' own parser refuses.
Findings are kept under .cache/fuzz; what they taught belongs in tests/hostile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / ".cache" / "fuzz"
WORDS = ["dtype", "shape", "data_offsets", "__metadata__", "weight_map", "BF16", "F4", "F8_E4M3", "BOOL", "C64", "U64"]
NUMBERS = ["0", "-1", "1e9", "4294967296", "9223372036854775807", "18446744073709551616", "[", "]", "{", "}", "null"]


def header(data: bytes) -> None:
    """A header of a file whose size the first two bytes say; what is accepted, safetensors accepts, and alike."""
    import safetensors

    from penstock.errors import FormatError
    from penstock.storage.safetensors import parse_header

    body, raw = int.from_bytes(data[:2], "little"), data[2:]
    file_nbytes = 8 + len(raw) + body
    try:
        found = parse_header(raw, file_nbytes=file_nbytes, uri="fuzz")
    except FormatError:
        return
    whole = len(raw).to_bytes(8, "little") + raw + bytes(body)
    theirs = dict(safetensors.deserialize(whole))
    assert set(theirs) == set(found.tensors.names), "names differ from safetensors'"
    for i, name in enumerate(found.tensors.names):
        assert tuple(theirs[name]["shape"]) == found.tensors.shapes[i], f"shape of {name!r} differs"
        assert len(theirs[name]["data"]) == found.tensors.nbytes[i], f"bytes of {name!r} differ"


def index(data: bytes) -> None:
    """An index file."""
    from penstock.errors import FormatError
    from penstock.storage.safetensors import parse_index

    try:
        shards = parse_index(data, uri="fuzz").values()
    except FormatError:
        return
    assert all(".." not in shard.split("/") and not shard.startswith("/") for shard in shards), "leaves its directory"


def manifest(data: bytes) -> None:
    """A manifest; what is accepted is written again and accepted again."""
    from penstock.errors import FormatError, IntegrityError
    from penstock.storage.manifest_file import MAGIC, decode, encode

    try:
        found = decode(MAGIC + data, uri="fuzz")
    except (FormatError, IntegrityError):
        return
    assert encode(decode(encode(found), uri="fuzz")) == encode(found)


TARGETS: dict[str, Callable[[bytes], None]] = {"header": header, "index": index, "manifest": manifest}


def seeds(target: str) -> list[bytes]:
    """Good inputs to start from."""
    from dataclasses import replace

    from penstock.config import Settings
    from penstock.storage import manifest_file
    from penstock.storage.manifest import open_weights
    from penstock.testing.checkpoints import every_dtype, write_llama

    place = ROOT / "seeds"
    write_llama(place / "llama", total_bytes=1 << 18, shards=2)
    every_dtype(place / "every.safetensors")
    if target == "index":
        return [
            (place / "llama" / "model.safetensors.index.json").read_bytes(),
            b'{"weight_map":{"a":"b.safetensors"}}',
        ]
    if target == "manifest":
        with open_weights(str(place / "llama"), settings=Settings(), names=["model.norm.weight", "*.0.*"]) as weights:
            raw = manifest_file.encode(replace(weights.manifest, leaves=None))
        return [raw.removeprefix(manifest_file.MAGIC)]
    small = {"__metadata__": {"a": "b"}, "x": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    small["y"] = {"dtype": "F32", "shape": [], "data_offsets": [2, 6]}
    found = [b"\x06\x00" + json.dumps(small).encode()]
    whole = (place / "every.safetensors").read_bytes()
    nbytes = int.from_bytes(whole[:8], "little")
    return [*found, (len(whole) - 8 - nbytes).to_bytes(2, "little") + whole[8 : 8 + nbytes]]


def fuzz(target: str, arguments: list[str]) -> None:
    """Run one target under atheris; does not return."""
    import atheris

    with atheris.instrument_imports(include=["penstock.storage"]):
        import penstock.storage.manifest_file
        import penstock.storage.safetensors  # noqa: F401
    atheris.Setup([sys.argv[0], *arguments], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    """Each target in a process of its own."""
    parser = argparse.ArgumentParser(description="Fuzz the parsers.")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.run:
        fuzz(args.run, rest)
    words = ROOT / "words"
    failed = []
    for target in args.targets:
        corpus = ROOT / target
        corpus.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(seeds(target)):
            (corpus / f"seed-{i}").write_bytes(seed)
        words.write_text("".join(f'"{word}"\n' for word in [*WORDS, *NUMBERS]))
        options = [f"-max_total_time={args.seconds}", "-timeout=1", "-rss_limit_mb=1024", f"-dict={words}"]
        options += [f"-artifact_prefix={ROOT}/{target}-", "-print_final_stats=1", "-max_len=65536", "-verbosity=0"]
        print(f"== {target}", flush=True)
        command = [sys.executable, __file__, "--run", target, *options, str(corpus)]
        failed += [target] * bool(subprocess.run(command, check=False, timeout=args.seconds + 300).returncode)
    print("failed: " + ", ".join(failed) if failed else "no fault found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
