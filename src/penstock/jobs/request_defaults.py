"""Words completed with what lies beside the sources, so that every worker is told the same.

In: an operation's words, its sources, opened. Out: words that say all: an adapter's configuration, heads, a delta, how
sources are quantised.
Not here: words of a command line (`cli.convert`), operations made of words (`jobs.operations.spec`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.errors import FormatError, PlanError
from penstock.jobs.operations.delta import FILE, decoded, delta_of, encoded
from penstock.jobs.operations.spec import COMPUTES_WITH_ALL, Word
from penstock.storage import read_small
from penstock.storage.weight_set import WeightSet, build
from penstock.transform.stored import declared, find
from penstock.types import Manifest

Options = Mapping[str, str] | None


def completed(words: Sequence[Word], sources: Sequence[WeightSet], settings: Settings, options: Options) -> list[Word]:
    """Return the words, the first of them completed: it is the one that has all sources; and each `dequantise`.

    Raises:
        PlanError: a file that it needs is not beside the source, or a delta is of another base.
        FormatError: it is not what it should be. SourceError: of reading.
    """
    if not words:
        return []
    first = dict(words[0])
    op = first.get("op")
    if op == "lora-merge" and "adapter_config" not in first and len(sources) == 2:
        raw = _beside(sources[1].uri, "adapter_config.json", settings, options)
        if raw is None:
            hint = "give adapter_config=..."
            raise PlanError(f"there is no adapter_config.json beside {sources[1].uri}", hint=hint)
        first["adapter_config"] = _json(raw, sources[1].uri)
    if op == "lora-merge" and "tied" not in first and sources:
        raw = _beside(sources[0].uri, "config.json", settings, options)
        first["tied"] = _tied(_json(raw, sources[0].uri)) if raw is not None else None
    if op == "reshard" and len(sources) > 1:
        _check_ranks(sources)
    if op == "reshard" and "heads" not in first and sources:
        raw = _beside(sources[0].uri, "config.json", settings, options)
        first["heads"] = _heads(_json(raw, sources[0].uri)) if raw is not None else []
    elif op in {"delta", "delta-apply"}:
        if len(sources) != 2:
            raise PlanError(f"{op} takes two sources, not {len(sources)}")
        base = _digested(sources[0])
        first["delta"] = _made(base, sources[1]) if op == "delta" else _read(base, sources[1], settings, options)
    if op in COMPUTES_WITH_ALL and "dequantise" not in first:
        quantised = [_quantised(one, settings, options) for one in sources]
        if any(one is not None for one in quantised):
            first["dequantise"] = quantised
    return [
        {**word, "quantization": _quantization(sources[0], settings, options)}
        if word.get("op") == "dequantise" and "quantization" not in word and sources
        else word
        for word in (first, *words[1:])
    ]


def _quantised(source: WeightSet, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the words of `dequantise` for a source; None: nothing of it is quantised."""
    table = source.manifest.tensors
    config = _quantization(source, settings, options)
    found = find(zip(table.names, table.dtypes, table.shapes, strict=True), config)
    return {"quantization": config} if config is not None or found.any else None


def _quantization(source: WeightSet, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the `quantization_config` of a source; None: it has none."""
    raw = _beside(source.uri, "config.json", settings, options)
    said = None if raw is None else declared(_json(raw, source.uri))
    if said is not None:
        return dict(said)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # AutoGPTQ's and ModelOpt's own
        if _beside(source.uri, name, settings, options) is not None:
            return {"quant_method": f"of {name}"}
    return None


def _beside(uri: str, name: str, settings: Settings, options: Options) -> bytes | None:
    directory = uri.rpartition("/")[0] if uri.endswith(".safetensors") else uri.rstrip("/")
    where = f"{directory}/{name}" if directory else name
    return read_small(where, settings=settings, storage_options=options)


def _json(raw: bytes, uri: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a configuration that is no object of JSON: {error}", uri=uri) from error


_RANK = re.compile(r"rank[-_](\d+)(?:[-_]of[-_](\d+))?")


def _check_ranks(sources: Sequence[WeightSet]) -> None:
    """PlanError where sources are surely not the ranks in order: by the numbers in their names, or one is there twice.

    Names without a number say nothing: then the order is the caller's word.
    """
    found = [_RANK.findall(source.uri.rstrip("/").rpartition("/")[2]) for source in sources]
    for rank, (source, numbers) in enumerate(zip(sources, found, strict=True)):
        number, count = numbers[-1] if numbers else ("", "")
        if all(found) and int(number) != rank:
            hint = "give every rank once, in order: rank 0 first"
            raise PlanError(f"reshard: source {rank} is rank {int(number)} by its name: {source.uri}", hint=hint)
        if count and int(count) != len(sources) and len(sources) > 1:
            raise PlanError(f"reshard: {source.uri} is one of {int(count)} ranks, and {len(sources)} sources are given")
    seen: dict[str, str] = {}
    for source in sources:
        revision = source.manifest.revision if source.manifest.leaves is not None else source.uri
        if revision in seen:
            raise PlanError(f"reshard: {source.uri} has the same bytes as {seen[revision]}", hint="give each rank once")
        seen[revision] = source.uri


def _heads(config: dict[str, Any]) -> list[int]:
    """Of queries and of keys, as transformers' configurations say them; none where they do not."""
    told = config.get("text_config") or config
    queries = told.get("num_attention_heads")
    return [queries, told.get("num_key_value_heads") or queries] if queries else []


def _tied(config: dict[str, Any]) -> bool | None:
    """Whether embedding and head are one tensor, as transformers' configurations say it; None where they do not."""
    text = config.get("text_config")
    said = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return None if said is None else bool(said)


def _digested(source: WeightSet) -> Manifest:
    """Its manifest with digests: as it has them, else read whole."""
    stated = source.manifest
    return stated if stated.leaves is not None and stated.leaf_bytes == LEAF_BYTES else build(source)


def _made(base: Manifest, new: WeightSet) -> bytes:
    return encoded(delta_of(base, _digested(new)))


def _read(base: Manifest, delta: WeightSet, settings: Settings, options: Options) -> bytes:
    raw = _beside(delta.uri, FILE, settings, options)
    if raw is None:
        raise PlanError(f"there is no {FILE} beside {delta.uri}", hint="the second source is what `delta` made")
    told = decoded(raw)
    if told.base != base.revision:
        raise PlanError(f"the delta is of {told.base}, and the base is {base.revision}")
    if told.leaf_bytes != LEAF_BYTES:
        raise PlanError(f"the delta has leaves of {told.leaf_bytes} bytes, not {LEAF_BYTES}")
    return raw
