"""Hints for errors of safetensors' own reader, which reads local files also after `penstock_hf.safetensors.install`.

The installed replacement adds the hint to the error as a note, which a traceback shows. Only an error imports this
module.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from penstock.errors import PenstockError, printable

PREFIX = "penstock: "
"""The start of each note."""

_ACCEPTED = {
    "filename": "pass the path as a str or an os.PathLike of str",
    "framework": 'pass "pt" for torch or "np" for NumPy. safetensors also accepts "tf", "flax", "mlx" and "paddle"',
    "backend": 'pass "mmap" or "pread"',
    "device": 'pass "cpu", "cuda", "cuda:1", the index of a CUDA device, or another device of torch. '
    'The framework "np" accepts only "cpu"',
}
"""What safetensors accepts, for each argument that its errors name."""

_ARGUMENT = re.compile(rf"(?:argument ')?({'|'.join(_ACCEPTED)})\b", re.IGNORECASE)
_ABSENT = re.compile(r"does not contain tensor (.*)", re.DOTALL)
_REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(/.+)?")
_CACHED = re.compile(r"(.*)/models--([^/]+)/snapshots/([^/]+)/(.+)", re.DOTALL)
_SEPARATORS = re.compile(r"[\W_]+")

_MAX_ENTRIES = 1000
"""Maximum number of files in a directory that are compared with the name of a missing file."""

_MAX_COMPARED = 8
"""Maximum number of names that are compared letter by letter, which takes about 30 us for each name."""

_MAX_CHARS = 300
"""Maximum length of a name that is compared. A hostile header may have names of megabytes."""

_SUFFIX = ".safetensors"


def of_open(error: Exception, filename: Any) -> str:
    """Return the hint for an error of opening a file, or an empty string."""
    argument = _ARGUMENT.match(str(error))
    if argument is not None:
        return _ACCEPTED[argument[1].lower()]
    path = os.fsdecode(filename)
    if isinstance(error, FileNotFoundError):
        return printable(_of_missing_file(path))
    if os.path.isdir(path):
        return printable(f"{path} is a directory. Pass the path of a file. {_content(path)}")
    is_about_header = isinstance(error, sys.modules["safetensors"].SafetensorError) and "header" in str(error)
    return printable(_of_header(path)) if is_about_header else ""


def of_use(error: Exception, file: Any) -> str:
    """Return the hint for an error of reading tensors from an open file, or an empty string for any other error."""
    if any(note.startswith(PREFIX) for note in getattr(error, "__notes__", ())):
        # In nested `with` blocks, the error has the hint of the inner file.
        return ""
    text = str(error)
    if isinstance(error, sys.modules["safetensors"].SafetensorError):
        absent = _ABSENT.search(text)
        # If this file has the tensor, the error is about another file.
        if absent is None or absent[1] in (names := file.keys()):
            return ""
        similar = _similar(absent[1], names)
        closest = f"Closest names: {_listed(similar, len(similar))}. " if similar else ""
        return printable(f"the file has {len(names)} tensors. {closest}keys() lists all names")
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError | AssertionError) or _can_read(file):
        return ""
    num_devices = torch.cuda.device_count()
    if not num_devices:
        return f'torch {torch.__version__} finds no CUDA device on this host. Pass device="cpu"'
    # Other errors of a device, for example after a failed kernel, are not about the argument.
    return f"torch finds only {num_devices} CUDA devices on this host, from index 0 on" if "ordinal" in text else ""


def _can_read(file: Any) -> bool:
    """Return whether torch can make tensors on the file's device. If so, an error is the program's own."""
    slices = (file.get_slice(name) for name in file.keys())  # noqa: SIM118 - the file is no mapping
    try:
        # This reads no bytes.
        next(each for each in slices if each.get_shape())[:0]
    except (RuntimeError, AssertionError):
        return False
    return True


def _of_missing_file(path: str) -> str:
    if not path:
        return "the path is empty"
    full = os.path.abspath(path)
    if os.path.exists(full):
        # safetensors reports every file that it cannot open as missing.
        is_readable = os.access(full, os.R_OK)
        return f"{full} exists. {'Pass this path' if is_readable else 'Give this user the right to read it'}"
    if os.path.islink(full):
        fault = f"{full} is a link to {os.readlink(full)}, which does not exist"
        return ". ".join(filter(None, (fault, _get_again(full))))
    hints = []
    repository = _REPOSITORY.fullmatch(path)
    if repository is not None and not repository[1].endswith(_SUFFIX) and not os.path.exists(path.partition("/")[0]):
        uri = f"hf://{repository[1]}{repository[2] or f'/model{_SUFFIX}'}"
        hints.append(f'If {repository[1]} is a repository on the Hugging Face hub, pass "{uri}"')
    folder, wanted = os.path.split(full)
    while not os.path.isdir(folder):
        folder, wanted = os.path.split(folder)
    if not os.access(folder, os.X_OK):
        return f"give this user the right to enter {folder}"
    hints.append(f"{folder} has no {wanted}. {_content(folder, wanted)}")
    if not os.path.isabs(path):
        hints.append(f"The path is relative to the working directory {os.getcwd()}")
    return ". ".join(hints)


def _content(folder: str, wanted: str = "") -> str:
    """Return which files of a directory a program may have meant."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _MAX_ENTRIES))
    except OSError as error:
        return f"The directory cannot be listed: {error.strerror}"
    if similar := _similar(wanted, names):
        return f"Similar names in it: {_listed(similar, len(similar))}"
    weights = [name for name in names if name.endswith(_SUFFIX)]
    if weights:
        return f"It has {_listed(weights, 3)}"
    return f"It has no *{_SUFFIX}" if names else "It is empty"


def _of_header(path: str) -> str:
    """Return the fault that Penstock's reader finds in the header, and how to get the file again."""
    from penstock.spi import Settings, open_source, read_header

    full = os.path.abspath(path)
    fault = "Penstock reads this header, so the file may be newer than safetensors: upgrade safetensors"
    try:
        source = open_source(full, settings=Settings())
        try:
            read_header(source)
        finally:
            source.close()
    except PenstockError as error:
        fault = "; ".join(filter(None, (error.message, error.hint)))
    name = shlex.quote(full)
    check = f"Check the file with `penstock inspect {name}`, or with `penstock verify {name}` if it has a manifest"
    return ". ".join(filter(None, (fault, _get_again(full), check)))


def _get_again(path: str) -> str:
    """Return the command that downloads a file in the cache of huggingface_hub again, or an empty string."""
    cached = _CACHED.fullmatch(path)
    if cached is None:
        return ""
    cache, folder, commit, name = map(shlex.quote, cached.groups())
    options = f"--revision {commit} --cache-dir {cache} --force-download"
    return f"Download it again with `hf download {folder.replace('--', '/')} {name} {options}`"


def _similar(wanted: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are similar to `wanted`, the closest first."""
    if len(wanted) > _MAX_CHARS:
        return []
    words = set(_SEPARATORS.split(wanted.lower()))

    def in_common(name: str) -> tuple[int, int]:
        return len(words.intersection(_SEPARATORS.split(name.lower()))), -abs(len(name) - len(wanted))

    # Comparing the letters of all names of a large model would take seconds, so choose by words and lengths first.
    short = (name for name in names if len(name) <= _MAX_CHARS)
    return difflib.get_close_matches(wanted, heapq.nlargest(_MAX_COMPARED, short, in_common))


def _listed(names: list[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
