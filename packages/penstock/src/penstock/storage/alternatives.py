"""Choose the files of a directory that form one weight set, without adapters, variants and duplicate copies."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence

from penstock.errors import ConfigError
from penstock.logs import log_named

log = log_named("penstock.storage")

# Mistral publishes the weights for transformers and again as `consolidated` files for its own code. Source:
# mistralai/Mistral-7B-Instruct-v0.3 and later.
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_CONSOLIDATED = re.compile(r"consolidated([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE)
# Adapters of PEFT and diffusers.
_ADAPTER = re.compile(
    r"(adapter_model|adapter|pytorch_lora_weights)([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE
)
# The same weights in other precisions or before averaging, from transformers and diffusers.
_VARIANT = re.compile(
    r"(?P<stem>.+?)(?P<part>-\d+-of-\d+)?\.(?P<variant>fp16|bf16|fp32|fp8|float16|bfloat16|float32|float8|half|int8|non_ema|ema)"
    r"(?P<later>-\d+-of-\d+)?\.safetensors(?P<index>\.index\.json)?",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?P<stem>.+?)(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_MAX_NAMES = 5
_HIDDEN = "hidden"
_DUPLICATE = "the directory has the same weights under other names"


def weight_files(files: Sequence[str], *, also: Sequence[str] = (), uri: str) -> list[str]:
    """Return the files that belong together, in order, and log the other files once.

    Args:
        files: weight files, or their indexes, in one directory.
        also: more files of the directory, which are considered but not returned.

    Raises:
        ConfigError: there are several variants and no plain file.
    """
    kept = _without(list(files), _HIDDEN, lambda name: name.startswith("."), uri)
    names = [_last(file) for file in (*kept, *also)]
    if any(not _ADAPTER.fullmatch(name) and not name.startswith(".") for name in names):
        kept = _without(kept, "adapter of a model", lambda name: _ADAPTER.fullmatch(name) is not None, uri)
    if any(_MODEL.fullmatch(name) for name in names):
        kept = _without(kept, _DUPLICATE, lambda name: _CONSOLIDATED.fullmatch(name) is not None, uri)
    plain = {match["stem"] for name in names if not _VARIANT.fullmatch(name) and (match := _PLAIN.fullmatch(name))}

    def has_plain(name: str) -> bool:
        match = _VARIANT.fullmatch(name)
        return match is not None and match["stem"] in plain

    kept = _without(kept, "variant of a plain file", has_plain, uri)
    _require_one_variant(kept, uri)
    return kept


def _last(file: str) -> str:
    return file.rpartition("/")[2]


def _without(files: list[str], why: str, is_other: Callable[[str], bool], uri: str) -> list[str]:
    """Return the files for which `is_other` is False, and log the rest."""
    others = [file for file in files if is_other(_last(file))]
    if not others:
        return files
    _log_once(uri, why, tuple(map(_last, others)))
    return [file for file in files if file not in set(others)]


@functools.lru_cache(maxsize=256)
def _log_once(uri: str, why: str, names: tuple[str, ...]) -> None:
    """Log the omitted files. A load checks a directory several times, so the cache prevents repetition."""
    named = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    level = logging.INFO if why in {_HIDDEN, _DUPLICATE} else logging.WARNING
    log.log(level, "%s: left out %s (%s). Name a file to load it.", uri, named, why)


def _require_one_variant(files: Sequence[str], uri: str) -> None:
    seen: dict[str, dict[str, str]] = {}
    for file in files:
        if match := _VARIANT.fullmatch(_last(file)):
            seen.setdefault(match["stem"], {}).setdefault(match["variant"], _last(file))
    for stem, found in seen.items():
        if len(found) > 1:
            message = f"{stem!r} exists in {len(found)} variants: {', '.join(sorted(found.values()))}"
            suffix = f"*.{next(iter(sorted(found)))}*.safetensors"
            raise ConfigError(message, uri=uri, hint=f"name one of these files, or give a glob such as {suffix}")
