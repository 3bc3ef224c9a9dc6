"""Names of weight files and indexes.

Libraries find weights by the stem of the name. For example, `diffusion_pytorch_model.fp16` is the stem of
`diffusion_pytorch_model.fp16.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

STEM = "model"
"""Stem of transformers checkpoints, and of sources whose files have no common stem."""
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-\d+(?P<variant>\.[\w-]+)?", re.DOTALL)
# transformers and diffusers name the index of `model.fp16.safetensors` `model.safetensors.index.fp16.json`.
_VARIANT = re.compile(r"(?P<model>model|diffusion_pytorch_model)\.(?P<variant>[\w-]+)")
_SAFE_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,99}")


def is_safe_stem(stem: str) -> bool:
    """Return whether a stem from another host is a valid file name on every system."""
    return _SAFE_STEM.fullmatch(stem) is not None


def stem_of(names: Iterable[str]) -> str:
    """Return the common stem of file names, including the variant, or `model` if they share no stem."""
    stems = set()
    for name in names:
        base = name.rpartition("/")[2]
        shard = _SHARD.fullmatch(stem := base.removesuffix(_SUFFIX))
        # Some writers number the whole name, as in `model.safetensors-00001-of-00002.safetensors`.
        stem = stem if shard is None else f"{shard['stem'].removesuffix(_SUFFIX)}{shard['variant'] or ''}"
        stems.add(stem if base.endswith(_SUFFIX) else STEM)
    return stems.pop() if len(stems) == 1 else STEM


def file_names(count: int, stem: str = STEM) -> list[str]:
    """Return the names of `count` files, numbered as transformers and diffusers number shards."""
    if count == 1:
        return [f"{stem}{_SUFFIX}"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}{_SUFFIX}" for i in range(count)]


def index_name(stem: str = STEM) -> str:
    """Return the name of the index for several files."""
    variant = _VARIANT.fullmatch(stem)
    if variant is None:
        return f"{stem}{_SUFFIX}.index.json"
    return f"{variant['model']}{_SUFFIX}.index.{variant['variant']}.json"


def names_of(groups: Sequence[str], stem: str = STEM) -> list[str]:
    """Return a file name for each group in `groups`. A group is a directory, or a name with a star for the number."""
    seen: dict[str, list[str]] = {}
    for group in dict.fromkeys(groups):
        count = groups.count(group)
        if "*" in group:
            seen[group] = [f"{group.replace('*', str(part))}{_SUFFIX}" for part in range(count)]
        else:
            seen[group] = [f"{group}/{name}" if group else name for name in file_names(count, stem)]
    return [seen[group].pop(0) for group in groups]
