"""Weights in pickle: recognised and refused, with the command that converts them.

In: names of files, or their first bytes. Out: `UnsafeFormat`.
Not here: any reading of them. A pickle is a program, which its reader runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from penstock.errors import UnsafeFormat

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Files of these suffixes that lie beside weights and are none. Source: what transformers' Trainer and accelerate write.
_OTHERS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
# torch.save writes a zip archive; before torch 1.6 it wrote a pickle of protocol 2.
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_SHOWN = 8

CONVERT = (
    "import sys, os, torch; from safetensors.torch import save_file; "
    "[save_file({k: v.clone().contiguous() for k, v in d.get('state_dict', d).items()}, "
    "os.path.splitext(f)[0] + '.safetensors') for f in sys.argv[1:] "
    "for d in [torch.load(f, map_location='cpu', weights_only=True)]]"
)
"""Program of the command in the message. `clone`, because safetensors refuses tensors that share memory, as tied
weights do."""


def is_weights(name: str) -> bool:
    """Return whether a file's name is one under which weights are published as pickle."""
    last = name.partition("?")[0].rpartition("/")[2]
    return last.endswith(_SUFFIXES) and not last.startswith(_OTHERS)


def is_pickle(first: bytes | bytearray) -> bool:
    """Return whether a file's first bytes are those of a pickle of torch."""
    # A file of safetensors begins with the length of its header, which may be any of these bytes, and then its JSON.
    is_safetensors = bytes(first[4:9]) == b"\0\0\0\0{"
    return bytes(first[:4]).startswith(_MAGICS) and not is_safetensors


def refusal(files: Sequence[str], uri: str) -> UnsafeFormat:
    """Return the error for files of pickled weights.

    Args:
        files: paths or URIs; remote ones are named by their last part, as they must be downloaded first.
        uri: of the place, for the message.
    """
    is_remote = any("://" in file for file in files)
    names = [file.partition("?")[0].rpartition("/")[2] if is_remote else file for file in files]
    shown = ", ".join(name.rpartition("/")[2] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    arguments = " ".join(map(shlex.quote, names[:_SHOWN]))
    more = f" (and {len(names) - _SHOWN} more files)" if len(names) > _SHOWN else ""
    first = "download the files, and convert them" if is_remote else "convert them"
    return UnsafeFormat(
        f"{shown}: a pickle, which runs code of its author when it is read; it is not read",
        uri=uri,
        hint=f'{first} where that is safe: python -c "{CONVERT}" {arguments}{more}',
    )
