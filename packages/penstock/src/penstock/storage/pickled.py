"""Recognise pickled weights and refuse them, because reading a pickle runs code. The error names a command to
convert."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from penstock.errors import UnsafeFormat

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Other files with these suffixes, written by transformers' Trainer and accelerate.
_OTHERS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
# torch.save writes a zip archive. Before torch 1.6 it wrote a pickle of protocol 2.
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_ARGUMENTS = 8

CONVERT = (
    "import sys, os, torch; from safetensors.torch import save_file; "
    "[save_file({k: v.clone().contiguous() for k, v in d.get('state_dict', d).items()}, "
    "os.path.splitext(f)[0] + '.safetensors') for f in sys.argv[1:] "
    "for d in [torch.load(f, map_location='cpu', weights_only=True)]]"
)
"""Program that converts pickled weights. It clones tensors, because safetensors refuses tensors that share memory."""


def is_weights(name: str) -> bool:
    """Return whether a file name is usual for pickled weights."""
    last = name.partition("?")[0].rpartition("/")[2]
    return last.endswith(_SUFFIXES) and not last.startswith(_OTHERS)


def is_pickle(first: bytes | bytearray) -> bool:
    """Return whether a file begins like a pickle from torch."""
    # The header length of a safetensors file may look like a pickle's magic, but JSON follows.
    is_safetensors = bytes(first[4:9]) == b"\0\0\0\0{"
    return bytes(first[:4]).startswith(_MAGICS) and not is_safetensors


def refusal(files: Sequence[str], uri: str) -> UnsafeFormat:
    """Return the error for pickled weights.

    Args:
        files: paths or URIs. Remote files must be downloaded first, so only their last segments are listed.
    """
    is_remote = any("://" in file for file in files)
    names = [file.partition("?")[0].rpartition("/")[2] if is_remote else file for file in files]
    some_names = ", ".join(name.rpartition("/")[2] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    arguments = " ".join(map(shlex.quote, names[:_MAX_ARGUMENTS]))
    more = f" (and {len(names) - _MAX_ARGUMENTS} more files)" if len(names) > _MAX_ARGUMENTS else ""
    first = "download the files and convert them" if is_remote else "convert the files"
    return UnsafeFormat(
        f"{some_names}: this is a pickle, which is not read because reading it runs code from its author",
        uri=uri,
        hint=f'{first} where running that code is safe: python -c "{CONVERT}" {arguments}{more}',
    )
