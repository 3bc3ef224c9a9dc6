"""Small files next to a model's weights: configurations, vocabularies, templates and code."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping

from penstock.config import Settings
from penstock.errors import PermissionDenied
from penstock.storage import is_remote, list_uris, read_small
from penstock.storage.locate import INDEX_SUFFIX

MAX_FILES = 2000
"""Maximum number of files in subfolders. A model has tens of them, and a data set has millions."""
TOO_MANY = f"the folders of the model have more than {MAX_FILES} files"


def walk(
    root: str, *, follow_links: bool = False, max_below: int | None = MAX_FILES
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the visible files below a local directory by name, and the reason for each omitted path.

    Args:
        follow_links: also follow symlinks to folders, visiting each folder once.
        max_below: maximum number of entries in subfolders. None sets no limit.
    """
    found, left_out = dict[str, str](), dict[str, str]()
    level, num_below = [("", root)], 0
    # Record visited folders, because a symlink may lead to a parent folder.
    seen = {_identity(root)}
    while level:
        folders = []
        for prefix, folder in level:
            if max_below is not None and num_below > max_below:
                left_out[folder] = TOO_MANY
                continue
            for entry, why in _entries(folder):
                num_below += bool(prefix)
                name = f"{prefix}{entry.name}"
                if not why and entry.is_dir():
                    is_new = follow_links or not entry.is_symlink()
                    if is_new and (identity := _identity(entry.path)) not in seen:
                        seen.add(identity)
                        folders.append((f"{name}/", entry.path))
                        continue
                    why = "a link to a folder"
                if why:
                    left_out[entry.path] = why
                else:
                    found[name] = entry.path
        level = folders
    return found, left_out


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _entries(folder: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError:
        list_uris(folder, settings=Settings.read())
        raise
    for entry in listed:
        why = ""
        try:
            mode = entry.stat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                why = "not a regular file"
            elif stat.S_ISDIR(mode) and not os.access(entry.path, os.R_OK | os.X_OK):
                why = "a folder that cannot be listed"
        except OSError as error:
            why = "a broken link" if entry.is_symlink() else f"not readable: {error.strerror}"
        yield entry, why


def read_sibling(uri: str, name: str, settings: Settings, storage_options: Mapping[str, str] | None) -> bytes | None:
    """Return the content of a file next to a source's weights, or None if it is absent."""
    path, _, query = uri.partition("?") if uri.startswith(("http://", "https://")) else (uri, "", "")
    # A URL's query, for example a signature, is valid for one object only.
    if query:
        return None
    directory = path.rpartition("/")[0] if path.endswith((".safetensors", ".gguf", INDEX_SUFFIX)) else path.rstrip("/")
    where = f"{directory}/{name}" if directory else name
    try:
        return read_small(where, settings=settings, storage_options=storage_options)
    except PermissionDenied:
        # Stores reply 403 for an absent object if the user may not list the bucket.
        if is_remote(where):
            return None
        raise
