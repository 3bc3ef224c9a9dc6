"""Read the header of a safetensors or GGUF file, chosen by the file's first bytes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from penstock.errors import FormatError, UnsafeFormat
from penstock.storage import safetensors
from penstock.storage.safetensors import Header
from penstock.storage.source import Source
from penstock.types import MIB

GGUF_SUFFIX = ".gguf"
GGUF_MAGIC = b"GGUF"
GGUF_GUESS_BYTES = MIB
"""Bytes of the first read from a file, enough for a header without a large tokenizer. The header of Llama 3 has 7.8 MB.
Each further read is four times as long as the bytes read so far."""

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Other files with these suffixes, written by transformers' Trainer and accelerate.
_OTHERS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
# torch.save writes a zip archive. Before torch 1.6 it wrote a pickle of protocol 2.
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_ARGUMENTS = 8

_CONVERT = (
    "import sys, os, torch; from safetensors.torch import save_file; "
    "[save_file({k: v.clone().contiguous() for k, v in d.get('state_dict', d).items()}, "
    "os.path.splitext(f)[0] + '.safetensors') for f in sys.argv[1:] "
    "for d in [torch.load(f, map_location='cpu', weights_only=True)]]"
)
"""Program that converts pickled weights. It clones tensors, because safetensors refuses tensors that share memory."""


def read_header(source: Source) -> Header:
    """Read and check a safetensors or GGUF header. Raises FormatError, UnsafeFormat (a pickle) or SourceTruncated."""
    is_named = source.uri.partition("?")[0].endswith(GGUF_SUFFIX)
    first = bytearray(min(GGUF_GUESS_BYTES if is_named else safetensors.HEADER_GUESS_BYTES, source.nbytes))
    if first:
        source.readv(0, [memoryview(first)])
    # Check the magic, because cached files have no suffix. As a safetensors header length, it exceeds the limit.
    if first.startswith(GGUF_MAGIC):
        from penstock.storage import gguf

        return gguf.read_header(source, first)
    if is_named:
        raise FormatError("not a GGUF file: it does not begin with 'GGUF'", uri=source.uri)
    # The header length of a safetensors file may look like a pickle's magic, but JSON follows.
    if first.startswith(_MAGICS) and first[4:9] != b"\0\0\0\0{":
        raise pickle_refusal([source.uri], source.uri)
    return safetensors.read_header(source, first=first)


def is_pickled_name(name: str) -> bool:
    """Return whether this is a usual file name for pickled weights."""
    last = name.partition("?")[0].rpartition("/")[2]
    return last.endswith(_SUFFIXES) and not last.startswith(_OTHERS)


def pickle_refusal(files: Sequence[str], uri: str) -> UnsafeFormat:
    """Return the error for pickled weights. Remote files must be downloaded first, so only their names are listed."""
    is_remote = any("://" in file for file in files)
    names = [file.partition("?")[0].rpartition("/")[2] if is_remote else file for file in files]
    some_names = ", ".join(name.rpartition("/")[2] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    arguments = " ".join(map(shlex.quote, names[:_MAX_ARGUMENTS]))
    more = f" (and {len(names) - _MAX_ARGUMENTS} more files)" if len(names) > _MAX_ARGUMENTS else ""
    first = "download the files and convert them" if is_remote else "convert the files"
    return UnsafeFormat(
        f"{some_names}: this is a pickle, which is not read because reading it runs code from its author",
        uri=uri,
        hint=f'{first} where running that code is safe: python -c "{_CONVERT}" {arguments}{more}',
    )
