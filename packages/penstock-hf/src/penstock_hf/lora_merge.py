"""Merge a LoRA adapter into full weights, on the publisher's or the receiver's side of a sync.

Each version is merged into the base's original values. PEFT's `merge_adapter` and `unmerge_adapter` instead add an
adapter and subtract it again, which would add a rounding error to the base with each version. `penstock convert` uses
the same arithmetic (`penstock_convert.operations.lora`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import penstock
from penstock import ConnectionSettings, Hooks, PublishReport, Shard, UpdateReport
from penstock.errors import BaseMismatch, PlanError
from penstock.spi import (
    Around,
    Closeable,
    Declarable,
    Digester,
    Memory,
    Placed,
    PublishMode,
    RegisteredStorages,
    ShardRow,
    Strips,
    TensorTable,
    Transforms,
    declared_shards,
    dtype_of,
    regions_of,
    require_same,
    tabulate,
    unwrapped,
    wrong_argument,
)
from penstock.sync import Publisher
from penstock_convert.operations.lora import LoraMerge
from penstock_convert.plan.tasks import Recipe
from penstock_hf.adapter import AdapterSubscriber, Base, adapter_subscriber

_LISTED = 5


class AdapterMerge:
    """Merges one adapter into one base, a box of one tensor at a time.

    Args:
        config: content of `adapter_config.json`.
        base, adapter: tensors by name, of which only names, dtypes and global shapes are used.
        tied: `tie_word_embeddings` from the base's configuration, or None if unknown.

    Attributes:
        changed: names of the base's tensors that the adapter changes.

    Raises:
        ConfigError: this kind of adapter cannot be added to weights.
        PlanError: the adapter does not fit the base, or it adds or removes tensors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        base: Mapping[str, torch.Tensor],
        adapter: Mapping[str, torch.Tensor],
        *,
        tied: bool | None = None,
    ) -> None:
        self._operation = LoraMerge(config, tied)
        recipes = {
            recipe.outputs[0].spec.name: recipe for recipe in self._operation.recipes([_table(base), _table(adapter)])
        }
        if other := sorted(recipes.keys() ^ base.keys()):
            message = (
                f"the adapter unties the head from the embedding, which cannot be merged into live weights: {other[0]}"
            )
            raise PlanError(message, hint="sync the adapter separately, or merge with `penstock convert`")
        self._recipes: dict[str, Recipe] = {
            name: recipe for name, recipe in recipes.items() if any(part.source == 1 for part in recipe.inputs)
        }
        for name, recipe in self._recipes.items():
            spec = recipe.outputs[0].spec
            if tuple(base[name].shape) != spec.shape:
                raise PlanError(f"the adapter resizes the tensor to {list(spec.shape)}", tensor=name)
        self.changed = frozenset(self._recipes)

    def merged(self, row: ShardRow, values: torch.Tensor, adapter: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the merged values for a box of a tensor.

        Args:
            row: box to merge, in a tensor that `changed` names.
            values: the base's original values for the box.
            adapter: the adapter's unsliced tensors.
        """
        recipe, box = self._recipes[row.name], row.form.box
        parts = [part.spec.name for part in recipe.inputs if part.source == 1]
        given = [adapter[name].to(values.device) for name in parts]
        start, stop = (box.start[0], box.stop[0]) if box.start else (0, 1)
        inputs = [values]
        if recipe.inputs[0].source == 1:
            # The adapter contains a full copy of the tensor, and the copy replaces the base's tensor.
            own = given.pop(0)
            inputs = [own[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]]
        if len(given) == 2:
            a, b = given
            columns = slice(box.start[1], box.stop[1])
            is_turned = recipe.inputs[2].at is None
            inputs += [a, b[columns]] if is_turned else [a[:, columns], b[start:stop]]
        elif given:
            # Copy the bias, because the operation scales it in place, and the original tensor belongs to the trainer.
            inputs.append(given[0][start:stop].clone())
        return self._operation.run(recipe, start, stop, [one.contiguous() for one in inputs])[0]


def _table(tensors: Mapping[str, torch.Tensor]) -> TensorTable:
    dtypes = [dtype_of(tensor.dtype) for tensor in tensors.values()]
    return tabulate(tuple(tensors), dtypes, [tuple(tensor.shape) for tensor in tensors.values()])


def _tied(model: torch.nn.Module) -> bool | None:
    """Return whether a transformers model ties its head to its embedding, or None if the config does not specify it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    tied = getattr(config, "tie_word_embeddings", None)
    return None if tied is None else bool(tied)


@dataclass(frozen=True, slots=True)
class _Made:
    """A box of a tensor that the adapter changes, and the buffer with the merged values."""

    row: ShardRow
    buffer: torch.Tensor


class MergedTensors:
    """A rank's tensors of a `PeftModel` with an adapter merged in, under the base's names. See `merged_publisher`.

    Attributes:
        published: tensors for `penstock.publisher`. A tensor that the adapter changes is a buffer, whose values are
            undefined before `refresh`. Every other tensor is the base's own tensor.

    Args:
        model: a `PeftModel`. If the model is to be sharded, call `fully_shard` before this call.
        adapter: name of the adapter in the model.

    Raises:
        ConfigError, PlanError: the adapter cannot be merged, for the reason in the error message.
    """

    def __init__(self, model: torch.nn.Module, adapter: str = "default") -> None:
        from penstock_hf.peft import adapter_config, adapter_parameters
        from penstock_hf.peft_layers import AdapterState

        model = unwrapped(model)
        self.published: dict[str, Declarable] = {}
        self._config = adapter_config(model, adapter)
        self._tie = _tied(model)
        self._base = frozenset(name for name, _ in _base_tensors(model))
        self._state = AdapterState(
            model, adapter, lambda: {**dict(_base_tensors(model)), **adapter_parameters(model, adapter)}
        )
        self._placed = Placed(self._state.tensors)
        base, self._adapter = self._parts()
        self._rows = declared_shards(base)
        self._storages = RegisteredStorages(regions_of((*self._rows, *declared_shards(self._adapter))))
        self._merge = AdapterMerge(self._config, base, self._adapter, tied=self._tie)
        self._made: list[_Made] = []
        self._make(base)

    def _parts(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the current tensors of the base and of the adapter."""
        base: dict[str, torch.Tensor] = {}
        adapter: dict[str, torch.Tensor] = {}
        for name, tensor in self._state.tensors.items():
            (base if name in self._base else adapter)[name] = tensor
        return base, adapter

    def _make(self, base: Mapping[str, torch.Tensor]) -> None:
        """Fill `published`. Reuse an existing buffer if the base's tensor is still on the same device."""
        buffers = {(made.row.name, made.row.form.box, made.row.tensor.device): made.buffer for made in self._made}
        self._made = []
        for name, tensor in base.items():
            if name not in self._merge.changed:
                self.published[name] = tensor
                continue
            shards = []
            for row in declared_shards({name: tensor}):
                buffer = buffers.get((name, row.form.box, row.tensor.device))
                if buffer is None:
                    buffer = torch.empty_like(row.tensor, memory_format=torch.contiguous_format)
                shards.append(Shard(tensor=buffer, global_shape=row.form.shape, offset=row.form.box.start))
                self._made.append(_Made(row, buffer))
            self.published[name] = shards

    def _follow(self) -> None:
        """Look up the tensors again if the trainer moved, cast or replaced some of them.

        Raises:
            ConfigError: a dtype or shape in the base has changed, so receivers would get different tensors.
            PlanError: memory was freed, or the adapter no longer fits the base. Nothing was changed.
        """
        if self._storages.are_there() and self._placed.is_same():
            return
        base, adapter = self._parts()
        rows = declared_shards(base)
        require_same(self._rows, rows)
        storages = RegisteredStorages(regions_of((*rows, *declared_shards(adapter))))
        # The adapter may have been cast, because the result does not depend on its dtype.
        merge = AdapterMerge(self._config, base, adapter, tied=self._tie)
        if merge.changed != self._merge.changed:
            name = min(merge.changed ^ self._merge.changed)
            raise PlanError(
                "the adapter changes different tensors than before", tensor=name, hint="create the publisher again"
            )
        self._rows, self._adapter, self._merge, self._storages = rows, adapter, merge, storages
        self._make(base)
        self._placed.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the adapter's current values into the buffers. All ranks call this.

        Raises:
            PlanError: PEFT has already merged an adapter, a layer is disabled or differs from the configuration in its
                options or scaling, or memory was freed. The buffers are unchanged.
            ConfigError: a dtype or shape in the base has changed. The buffers are unchanged.
        """
        self._state.require_same(is_used=True)
        self._follow()
        # Gather the unsharded factors, because a rank needs other ranks' rows and the factors are small. For DTensors
        # this is a collective.
        whole = {name: _whole(tensor) for name, tensor in self._adapter.items()}
        for made in self._made:
            made.buffer.copy_(self._merge.merged(made.row, made.row.tensor, whole))


class MergedPublisher(Closeable):
    """A rank that publishes its base with an adapter merged in. `merged_publisher` creates it. A context manager.

    Attributes:
        publisher: publisher of the sync.
        tensors: the merged tensors.
    """

    def __init__(self, publisher: Publisher, tensors: MergedTensors) -> None:
        self.publisher = publisher
        self.tensors = tensors

    def publish(self, version: int, *, metadata: Mapping[str, str] | None = None) -> PublishReport:
        """Merge the adapter's current values, and publish a version. All ranks call this.

        Raises:
            PlanError, ConfigError: see `MergedTensors.refresh`. Nothing is published.
            PenstockError: see `penstock.sync.Publisher.publish`.
        """
        self.tensors.refresh()
        return self.publisher.publish(version, metadata=metadata)

    def close(self) -> None:
        """Leave the sync. Idempotent."""
        self.publisher.close()


def merged_publisher(
    name: str,
    model: torch.nn.Module,
    *,
    adapter: str = "default",
    connection: ConnectionSettings | str | None = None,
    mode: PublishMode = "snapshot",
    transforms: Transforms | None = None,
    rank: tuple[int, int] | None = None,
    snapshot_device: str = "device",
) -> MergedPublisher:
    """Publish the weights of a `PeftModel` with an adapter merged into them, under the base's names.

    The base's parameters are never modified. Each tensor that the adapter changes needs memory for a second copy, and a
    snapshot copies all tensors. All ranks make this call at the same time, and publish the same versions.

    Args:
        name: name of the sync.
        model: a `PeftModel`. If the model is to be sharded, call `fully_shard` before this call.
        adapter: name of the adapter in the model.
        connection, mode, transforms, rank, snapshot_device: see `penstock.publisher`.

    Raises:
        ConfigError, PlanError: the adapter cannot be merged, for the reason in the error message.
        PenstockError: see `penstock.publisher`.
    """
    tensors = MergedTensors(model, adapter)
    publisher = penstock.publisher(
        name,
        tensors.published,
        connection=connection,
        mode=mode,
        transforms=transforms,
        rank=rank,
        snapshot_device=snapshot_device,
    )
    return MergedPublisher(publisher, tensors)


def _base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a PeftModel's base, under the names that they have without PEFT."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        parts = name.replace("_orig_mod.", "").removeprefix("base_model.model.").split(".")
        if any(part.startswith("lora_") or part == "modules_to_save" for part in parts) or parts[-1] == "_extra_state":
            continue
        yield ".".join(part for part in parts if part not in ("base_layer", "original_module")), tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class MergingSubscriber(Closeable):
    """A base model with the newest version of an adapter merged into it. `merging_subscriber` creates it.

    Attributes:
        received: subscription to the adapter's versions.
        version: the version that is merged into the model, or -1 if the model is the base.
        is_dirty: whether a failed merge has changed the model. If so, do not use the model before an update succeeds.
        pause_s: duration in seconds of the last pause, in which values were copied into the model.
    """

    def __init__(self, received: AdapterSubscriber, model: torch.nn.Module, hooks: Hooks, *, on_host: bool) -> None:
        self.received = received
        self.version = -1
        self.is_dirty = False
        self.pause_s = 0.0
        self._model = model
        self._hooks = hooks
        self._on_host = on_host
        self._merge: tuple[str, AdapterMerge] | None = None
        self._base = ""
        # Original rows and values of each tensor that any version has changed.
        self._pristine: dict[str, list[tuple[ShardRow, torch.Tensor]]] = {}
        # Digests of the rows in `_pristine` after the last merge.
        self._left: dict[str, list[int]] = {}
        self._digesters: dict[str, Digester] = {}

    def update(self, version: int | None = None, timeout_s: float | None = None) -> UpdateReport:
        """Receive a version, and merge it into the model.

        Raises:
            BaseMismatch: the version is for a different base, or other code changed the merged weights.
            PlanError, ConfigError: the adapter cannot be merged into this model, for the reason in the error message.
            PenstockError: see `penstock.sync.Subscriber.update`. The model is unchanged unless `is_dirty` is true.
        """
        report = self.received.update(version, timeout_s)
        if self.received.version == self.version and not self.is_dirty:
            return report
        self._follow()
        if self.received.base != self._base:
            # The base was updated, so discard the stored values of the previous base.
            self._pristine, self._left, self._base = {}, {}, self.received.base
        elif not self.is_dirty:
            self._check_untouched()
        with torch.no_grad():
            self._install(self.received.version, self._merged())
        return report

    def _state(self) -> dict[str, torch.Tensor]:
        state = self._model.state_dict(keep_vars=True)
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}

    def _follow(self) -> None:
        """Look up the changed tensors again, because an engine may have moved or replaced them.

        Raise PlanError if a tensor is missing or was freed, or its dtype or shape has changed. Nothing was changed
        then.
        """
        state = self._state()
        for name, kept in self._pristine.items():
            rows = declared_shards({name: state[name]}) if name in state else ()
            if [row.form.values for row in rows] != [row.form.values for row, _ in kept]:
                message = "the tensor is gone or has changed since a version was merged into the model"
                raise PlanError(message, tensor=name, hint="load the base again, and subscribe again")
            self._pristine[name] = [(row, values) for row, (_, values) in zip(rows, kept, strict=True)]

    def _merged(self) -> dict[str, list[torch.Tensor]]:
        """Return the new values of all tensors that any version has changed."""
        state = self._state()
        adapter = self.received.tensors
        config = self.received.config
        key = repr((sorted(config.items(), key=str), [(name, one.shape) for name, one in adapter.items()]))
        if self._merge is None or self._merge[0] != key:
            self._merge = key, AdapterMerge(config, state, adapter, tied=_tied(self._model))
        merge = self._merge[1]
        for name in sorted(merge.changed - self._pristine.keys()):
            rows = declared_shards({name: state[name]})
            self._pristine[name] = [(row, self._kept(row.tensor)) for row in rows]
        return {
            name: [
                # Restore the base's values if only an earlier version changed this tensor.
                merge.merged(row, values.to(row.tensor.device), adapter) if name in merge.changed else values
                for row, values in rows
            ]
            for name, rows in self._pristine.items()
        }

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True) if self._on_host else tensor.clone()

    def _install(self, version: int, values: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy values into the model between the hooks that pause and resume the engine."""
        began = time.perf_counter()
        self._call("before_pause", version)
        self.is_dirty = True
        for name, parts in values.items():
            for (row, _), part in zip(self._pristine[name], parts, strict=True):
                row.tensor.copy_(part)
        self._left = {name: self._digests(name) for name in values}
        self.version = version
        self.is_dirty = False
        self._call("at_commit", version)
        self.pause_s = time.perf_counter() - began
        self._call("after_resume", version)

    def _call(self, hook: Around, version: int) -> None:
        self._hooks.call(hook, version, live=self.version, is_dirty=self.is_dirty)

    def _check_untouched(self) -> None:
        """Raise BaseMismatch if the merged weights have changed since the last version was merged."""
        changed = [name for name, left in self._left.items() if self._digests(name) != left]
        if changed:
            shown = ", ".join(changed[:_LISTED])
            raise BaseMismatch(
                f"{len(changed)} merged weights have changed since version {self.version} was merged: {shown}",
                expected=f"{self._base} with version {self.version} merged",
                found="other values",
                hint="load the base again and subscribe again, or report the base's new version through base=",
            )

    def _digests(self, name: str) -> list[int]:
        found: list[int] = []
        for row, _ in self._pristine[name]:
            tensor = row.tensor.contiguous()
            device, nbytes = str(tensor.device), tensor.numel() * tensor.itemsize
            digester = self._digesters.setdefault(device, Digester(device))
            memory = Memory(address=tensor.data_ptr(), nbytes=nbytes, device=device, owner=tensor)
            one = np.ones(1, np.int64)
            strips = Strips(at=0 * one, run_bytes=nbytes * one, num_rows=one, pitch=0 * one)
            found += digester.digests(memory, strips).tolist()
        return found

    def restore(self) -> None:
        """Restore the base's own values in the model."""
        self._follow()
        with torch.no_grad():
            self._install(-1, {name: [values for _, values in rows] for name, rows in self._pristine.items()})

    def close(self) -> None:
        """Leave the sync, and leave the model's weights unchanged. Idempotent."""
        self.received.close()


def merging_subscriber(
    name: str,
    model: torch.nn.Module,
    *,
    base: Base,
    connection: ConnectionSettings | str | None = None,
    hooks: Hooks | None = None,
    pristine: str = "device",
) -> MergingSubscriber:
    """Receive the versions of an adapter, and merge each version into a model's own weights.

    Each changed tensor needs memory for a second copy with the original values, and for a third copy during an update.
    Raises the same errors as `penstock.subscriber`.

    Args:
        name: name of the sync under which a trainer publishes the adapter.
        model: the base, with the checkpoint's tensor names. The tensors may be DTensors. Their addresses stay.
        base: see `adapter.base_identity`.
        connection: see `penstock.subscriber`.
        hooks: `before_read`, and the hooks that run before and after values are copied into the model.
        pristine: where the base's original values of the changed tensors are stored: `device` for the model's device,
            or `cpu`.
    """
    if pristine not in ("device", "cpu"):
        raise wrong_argument("pristine", pristine, "device or cpu")
    hooks = hooks or Hooks()
    # Pass only `before_read`. The adapter's tensors arrive in separate memory, so the engine need not pause.
    received = adapter_subscriber(name, base=base, connection=connection, hooks=Hooks(before_read=hooks.before_read))
    return MergingSubscriber(received, model, hooks, on_host=pristine == "cpu")
