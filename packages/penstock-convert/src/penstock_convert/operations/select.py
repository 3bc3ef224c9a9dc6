"""Selects the tensors to quantise, and creates the entry in config.json that tells engines how to load the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.transform.formats import Format
from penstock.transform.select import KEEP, Tensor, reasons

_SHOWN = 3
"""Maximum number of reasons that the error lists if no tensor remains to be quantised."""
HEAD = "lm_head"
"""Name of a language model's output layer in transformers, even if it is tied to the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Tensors of a model that are quantised, and the reasons why other tensors are not quantised."""

    names: tuple[str, ...]
    """Names of the tensors to quantise, in the order in which they were passed."""
    kept: Mapping[str, str]
    """Reason for each tensor that is kept unchanged."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each kept tensor."""
    stored: frozenset[str] = frozenset()
    """Tensors that are kept because the source already stores them in this format."""

    def modules_kept(self) -> tuple[str, ...]:
        """Return the modules that are not quantised. Without this list engines treat every linear layer as quantised.

        The list includes the modules of expert stacks. An output layer that is tied to the embedding, and
        therefore has no tensor, is also listed.
        """
        modules = set()
        for name in self.kept.keys() - self.stored:
            if name.endswith(".weight"):
                modules.add(name.removesuffix(".weight"))
            elif len(self.shapes[name]) > 2 and "." in name:
                modules.add(name.rpartition(".")[0])
        if not any(HEAD in name for name in (*self.names, *self.kept)):
            modules.add(HEAD)
        return tuple(sorted(modules))


def select(
    form: Format,
    tensors: Iterable[Tensor],
    *,
    keep: Sequence[str] = KEEP,
    only: Sequence[str] = ("*.weight",),
    stored: Collection[str] = (),
) -> Selection:
    """Select the linear weights, which are 2-D tensors whose names match a shell pattern in `only` and none in `keep`.

    Args:
        form: format in which the selected tensors will be stored.
        tensors: all tensors of the model.
        stored: names of tensors that are already stored in this format.

    Raises:
        PlanError: no tensor remains to be quantised.
    """
    tensors = list(tensors)
    why = reasons(form, tensors, keep=keep, only=only)
    # Override other reasons, so that tensors that are already stored in this format are not quantised again.
    why |= dict.fromkeys(stored, f"it is already stored as {form.tag}")
    names = tuple(name for name, reason in why.items() if not reason)
    if not names:
        common = Counter(why[name] for name, _, shape in tensors if len(shape) > 1).most_common(_SHOWN)
        detail = "; ".join(f"{reason} ({count} tensors)" for reason, count in common)
        raise PlanError(
            f"no tensor is left to store as {form.tag}: {detail}", hint="change the patterns only= and keep="
        )
    return Selection(
        names=names,
        kept={name: reason for name, reason in why.items() if reason},
        shapes={name: shape for name, _, shape in tensors if why[name]},
        stored=frozenset(stored),
    )


def quantization_config(form: Format, selection: Selection) -> dict[str, Any]:
    """Return the `quantization_config` entry for `config.json`.

    Raises:
        PlanError: the format has no such entry, for example because it is a cast.
    """
    if form.config is None:
        raise PlanError(f"{form.tag} needs no quantization_config, since the tensors have its dtype")
    return form.config(selection.modules_kept())
