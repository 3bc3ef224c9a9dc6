"""Files of a directory that are no part of its weight set: hidden ones, adapters, variants, and a second set of names.

In: the names of the files in one directory. Out: those that belong together.
Not here: the index, which decides where there is one (`locate`); globs and lists of files, which users choose.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence

from penstock.errors import ConfigError
from penstock.logs import log_named

log = log_named("penstock.storage")

# Mistral publishes the weights twice: as transformers reads them, and `consolidated` under the names of its own code.
# Both together are the model twice over. Source: the repositories mistralai/Mistral-7B-Instruct-v0.3 and later.
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_CONSOLIDATED = re.compile(r"consolidated([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE)
# As PEFT and diffusers name adapters.
_ADAPTER = re.compile(
    r"(adapter_model|adapter|pytorch_lora_weights)([.-].*)?\.safetensors(\.index\.json)?", re.IGNORECASE
)
# As transformers, diffusers and their users name the same weights in another precision, or before averaging. The number
# of a shard stands before or after the variant.
_VARIANT = re.compile(
    r"(?P<stem>.+?)(?P<part>-\d+-of-\d+)?\.(?P<variant>fp16|bf16|fp32|fp8|float16|bfloat16|float32|float8|half|int8|non_ema|ema)"
    r"(?P<later>-\d+-of-\d+)?\.safetensors(?P<index>\.index\.json)?",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?P<stem>.+?)(-\d+-of-\d+)?\.safetensors", re.IGNORECASE)
_NAMED = 5
_HIDDEN = "it is hidden"
_SAME = "the same weights are there under other names"


def belonging(files: Sequence[str], *, also: Sequence[str] = (), uri: str) -> list[str]:
    """Return the files that belong together, in order. The others are logged, once.

    Args:
        files: names or URIs of weights, or of their indexes, in one directory.
        also: files that are there too, and are not to be returned.
        uri: of the directory, for messages.

    Raises:
        ConfigError: there are several variants, and no plain file that would be the usual choice.
    """
    kept = _without(list(files), _HIDDEN, lambda name: name.startswith("."), uri)
    names = [_last(file) for file in (*kept, *also)]
    if any(not _ADAPTER.fullmatch(name) and not name.startswith(".") for name in names):
        kept = _without(kept, "an adapter lies beside a model", lambda name: _ADAPTER.fullmatch(name) is not None, uri)
    if any(_MODEL.fullmatch(name) for name in names):
        kept = _without(kept, _SAME, lambda name: _CONSOLIDATED.fullmatch(name) is not None, uri)
    plain = {match["stem"] for name in names if not _VARIANT.fullmatch(name) and (match := _PLAIN.fullmatch(name))}

    def has_plain(name: str) -> bool:
        match = _VARIANT.fullmatch(name)
        return match is not None and match["stem"] in plain

    kept = _without(kept, "it is a variant of a plain file", has_plain, uri)
    _require_one_variant(kept, uri)
    return kept


def _last(file: str) -> str:
    return file.rpartition("/")[2]


def _without(files: list[str], why: str, is_other: Callable[[str], bool], uri: str) -> list[str]:
    """Return the files whose names are not of a kind, and log the others."""
    others = [file for file in files if is_other(_last(file))]
    if not others:
        return files
    _say(uri, why, tuple(map(_last, others)))
    return [file for file in files if file not in set(others)]


@functools.lru_cache(maxsize=256)
def _say(uri: str, why: str, names: tuple[str, ...]) -> None:
    """Log what is left out, once: a place is looked at several times in a load."""
    named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    # An adapter and a variant may be what the user wanted.
    level = logging.INFO if why in {_HIDDEN, _SAME} else logging.WARNING
    log.log(level, "%s: %s is left out: %s. Name a file to load it.", uri, named, why)


def _require_one_variant(files: Sequence[str], uri: str) -> None:
    """Raise ConfigError if one set of weights is there in several variants."""
    seen: dict[str, dict[str, str]] = {}
    for file in files:
        if match := _VARIANT.fullmatch(_last(file)):
            seen.setdefault(match["stem"], {}).setdefault(match["variant"], _last(file))
    for stem, found in seen.items():
        if len(found) > 1:
            message = f"{stem!r} is there in {len(found)} variants: {', '.join(sorted(found.values()))}"
            suffix = f"*.{next(iter(sorted(found)))}*.safetensors"
            raise ConfigError(message, uri=uri, hint=f"name one of these files, or give a glob as {suffix}")
