"""The staging model of a vLLM model: its weights in the format that its own loader fills, to be received and installed.

In: a loaded vLLM model. Out: a module whose tensors are received into, loaded and recorded as any other's; `install`.
Not here: receiving (`penstock.sync`), when to install (`vllm_sync`).

vLLM repacks, quantises and drops parameters after loading: what serves is not what a loader can fill. It remembers of
each layer what that was; the staging model is that, allocated. Installing is vLLM's layerwise reload, a layer at a
time: the layer as loaded, its post-processing, then copies into the tensors that serve, whose addresses stay (CUDA
graphs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.errors import ConfigError, PlanError
from penstock.memory.arena import Arena, needed_bytes
from penstock.sync.recording.requirements import Requirements

_LISTED = 10
"""Parameters that an error names; the rest are counted."""


class StagingModel(torch.nn.Module):
    """A vLLM model's weights as its loader fills them, under the model's names, in memory of their own."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device | str) -> None:
        """Allocate them on `device`: as much as the model's weights took before vLLM post-processed them.

        Raises:
            ConfigError: a layer's parameters have no shape before they are loaded.
            DeviceOutOfMemory, DestinationError: there is no room.
        """
        super().__init__()
        self._vllm_config = vllm_config
        self._model = (model,)  # in a tuple, since it is no part of this module
        self._loaded: set[str] = set()
        formats = {name: _loader_format(name, layer) for name, layer in model.named_modules()}
        nbytes = needed_bytes(_span_bytes(form) for forms in formats.values() for form in forms.values())
        arena = Arena.allocate(nbytes, device)
        self._layers = [
            _Layer(name, layer, _made_real(self, name, formats[name], arena))
            for name, layer in model.named_modules()
            if formats[name]
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Return the model's own loading, into the staging model.

        Order: the model must not run meanwhile: its layers hold the staging model's tensors until this returns.
        """
        from vllm.config import set_current_vllm_config

        (model,) = self._model
        with set_current_vllm_config(self._vllm_config), contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.uses_staging_tensors())
            named: set[str] | None = model.load_weights(weights)  # type: ignore[operator]
            self._loaded |= named or set()
            return named

    def unfilled(self, wanted: Requirements) -> Mapping[str, int]:
        """Return how many elements of a tensor an update leaves, of those that have any; as far as the loader tells."""
        if not wanted.unrecorded:
            return wanted.unfilled
        return {name: count for name, count in wanted.unfilled.items() if name not in self._loaded}

    def check(self, wanted: Requirements, *, strict: bool = True) -> None:
        """See that what an update fills can be installed, before anything is touched.

        Args:
            wanted: what an update fills.
            strict: every parameter of the model, but what attention keeps for itself, must be filled.

        Raises:
            ConfigError: vLLM made one tensor of two that are published, or cannot reload a layer.
            PlanError: parameters that no rank publishes; lists them.
        """
        unfilled = self.unfilled(wanted)
        sources = self._sources(unfilled)
        whole = {name for name in sources if unfilled.get(name, 0) in (0, sources[name].numel())}
        lacking = [name for layer in self._layers for name in layer.lacking(whole)]
        if lacking and strict:
            more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
            hint = 'give "strict": false in init_info if they are to stay as they are'
            raise PlanError(f"nobody publishes {', '.join(lacking[:_LISTED])}{more}", hint=hint)
        for layer in self._layers:
            layer.check(sources)

    @torch.no_grad()
    def install(self, wanted: Requirements) -> None:
        """Put what an update filled into the model that serves; the rest stays unchanged.

        Order: after `check`. The model must not run meanwhile; after an error it is neither the old one nor the new.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        (model,) = self._model
        sources = self._sources(self.unfilled(wanted))
        initialize_layerwise_reload(model)
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                for name, whole in layer.names():
                    if whole in sources:
                        stack.enter_context(_reloaded(layer.live, name, sources[whole]))
            finalize_layerwise_reload(model, self._vllm_config.model_config)
        for layer in self._layers:
            if layer.is_among(sources) and (experts := _experts_to_pack(layer.live)) is not None:
                experts.process_weights_after_loading(layer.live)

    def _sources(self, unfilled: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return what each tensor is made of: the staging model's own, or that of one it is tied to.

        A layer that shares another's tensor (`lm_head` the embeddings') may have processed it for itself.
        """
        found: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        shared: list[tuple[str, int]] = []
        for layer in self._layers:
            for name, whole in layer.names():
                live, staging = getattr(layer.live, name, None), getattr(layer.staging, name)
                place = live.data_ptr() if isinstance(live, torch.Tensor) and live.numel() else None
                if unfilled.get(whole, 0) == staging.numel():
                    if place is not None:
                        shared.append((whole, place))
                    continue
                found[whole] = staging
                if place is not None and (other := names.setdefault(place, whole)) != whole:
                    raise ConfigError(
                        f"vLLM holds {whole} and {other} as one tensor, and both are published",
                        hint="have tie_word_embeddings of the model's config say what the trainer does",
                    )
        return found | {whole: found[names[place]] for whole, place in shared if place in names}


class _Layer:
    """One layer of the model, and the module of its tensors in the loader's format."""

    def __init__(self, name: str, live: torch.nn.Module, staging: torch.nn.Module) -> None:
        self.live, self.staging = live, staging
        self._prefix = f"{name}." if name else ""

    def names(self) -> Iterator[tuple[str, str]]:
        """Of each tensor that has elements its name in the layer, and in the model."""
        for name, tensor in (*self.staging._parameters.items(), *self.staging._buffers.items()):
            if tensor is not None and tensor.numel():
                yield name, self._prefix + name

    def is_among(self, filled: Collection[str]) -> bool:
        """Return whether it is processed anew."""
        return any(whole in filled for _, whole in self.names())

    def lacking(self, filled: Collection[str]) -> list[str]:
        """Parameters that are not filled, but for what attention keeps of its own: scales of its cache."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        if is_deferred_attention_layer(self.live):
            return []
        return [whole for name, whole in self.names() if name in self.staging._parameters and whole not in filled]

    def check(self, filled: Collection[str]) -> None:
        """ConfigError where the layer is processed anew without all it needs, or would not be processed."""
        from vllm.model_executor.model_loader.reload import meta

        if not self.is_among(filled):
            return
        _experts_to_pack(self.live)
        lacking = [whole for whole in self.lacking(filled) if whole.rpartition(".")[2] not in meta.SKIP_TENSORS]
        if lacking:
            raise ConfigError(f"vLLM processes a layer as a whole, and of this one nobody publishes {lacking}")

    @contextlib.contextmanager
    def uses_staging_tensors(self) -> Iterator[None]:
        """The live layer with the staging model's tensors in the place of its own."""
        own = self.live.__dict__
        hiding = {name: own.pop(name) for name, _ in self.names() if name in own}
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (self.live._parameters, self.staging._parameters),
            (self.live._buffers, self.staging._buffers),
        ]
        saved = [dict(group) for group, _ in pairs]
        for group, staging in pairs:
            absent = {name: None for name, tensor in group.items() if tensor is None}
            group.clear()
            group.update(absent | staging)
        try:
            yield
        finally:
            for (group, staging), before in zip(pairs, saved, strict=True):
                # What the loader put in a parameter's place goes to the staging model, for a recorder to see.
                staging.update({name: group[name] for name in staging if group.get(name) is not None})
                group.clear()
                group.update(before)
            own.update(hiding)


@contextlib.contextmanager
def _reloaded(layer: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    """Give vLLM's reload one whole tensor of a layer; with the last of them it processes the layer.

    Until the end the tensor's loader is the plain copy: the staging model's went through its own loader already.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    target = getattr(layer, name)
    if name in meta.SKIP_LOAD_TENSORS:
        target.data.copy_(value)
        yield
        return
    before = _own_loader(target.weight_loader)
    target.weight_loader = default_weight_loader
    try:
        layerwise.make_online_process_loader(layer, name)(target, value)
        yield
    finally:
        target.weight_loader = before


def _experts_to_pack(layer: torch.nn.Module) -> Any | None:
    """Experts with a packing of their own, which vLLM leaves out of a reload where they are not quantised.

    Raises:
        ConfigError: it is not known here how these are packed anew.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, unquantized_fused_moe_method.UnquantizedFusedMoEMethod):
        return None
    experts = getattr(method.moe_kernel, "fused_experts", None)
    packing = getattr(type(experts), "process_weights_after_loading", None)
    if packing in (None, modular_kernel.FusedMoEExperts.process_weights_after_loading):
        return None
    if not isinstance(experts, cpu_moe.CPUUnquantizedExperts):
        raise ConfigError(f"vLLM does not pack the weights of {type(experts).__name__} when they are reloaded")
    return experts


def _loader_format(where: str, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's tensors as they were before loading: on meta, but those that vLLM never moves there, as they are."""
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    live = {name: tensor for name, tensor in (layer._parameters | layer._buffers).items() if tensor is not None}
    found = {name: sanitize.restore_layer_refs(form, layer) for name, form in (parameters | buffers).items()}
    found |= {name: tensor for name, tensor in live.items() if name in meta.SKIP_TENSORS}
    for name, form in found.items():
        if torch.nn.parameter.is_lazy(form):
            raise ConfigError(f"{where}.{name} has no shape before it is loaded: it cannot be received into")
    return found


def _made_real(root: torch.nn.Module, path: str, formats: Mapping[str, torch.Tensor], arena: Arena) -> torch.nn.Module:
    """Return the module at this dotted name under `root`, with tensors of these formats: zero, in the arena."""
    made = root
    for part in path.split(".") if path else ():
        if part not in made._modules:
            made.add_module(part, torch.nn.Module())
        made = made.get_submodule(part)
    for name, form in formats.items():
        nbytes = _span_bytes(form)
        (offset,) = arena.place([nbytes])
        tensor = arena.bytes_at(offset, nbytes).zero_().view(form.dtype).as_strided(form.shape, form.stride())
        # As vLLM makes a layer real: its class, and what is known of the parameter, its loader above all.
        tensor.__class__, tensor.__dict__ = form.__class__, _attributes(form)
        if isinstance(tensor, torch.nn.Parameter):
            made.register_parameter(name, tensor)
        else:
            made.register_buffer(name, tensor)
    return made


def _attributes(form: torch.Tensor) -> dict[str, Any]:
    loaders = {name: form.__dict__[name] for name in ("weight_loader", "_weight_loader") if name in form.__dict__}
    return form.__dict__ | {name: _own_loader(loader) for name, loader in loaders.items()}


def _own_loader(loader: Any) -> Any:
    """Return a tensor's loader without what a reload wrapped it in."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
