"""A staging model that receives a vLLM model's weights in the layout that vLLM's loader fills.

vLLM repacks, quantises and drops parameters after loading, so a loader cannot fill the serving tensors. vLLM records
each layer's original shapes, and the staging model has tensors with these shapes.

Installation uses vLLM's layerwise reload. Each layer in turn is loaded and processed again, and then copied into the
serving tensors. The addresses of the serving tensors stay the same, because CUDA graphs refer to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.errors import ConfigError, PlanError
from penstock.spi import Arena, Requirements, needed_bytes

_LISTED = 10
"""Maximum number of parameters that an error lists. The error states only the number of further parameters."""


def check_reload() -> None:
    """Check that this version of vLLM has the names of the reload. Raise ImportError or AttributeError otherwise."""
    from vllm.model_executor.layers import attention
    from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: F401

    _ = reload.initialize_layerwise_reload, reload.finalize_layerwise_reload
    _ = layerwise.get_layerwise_info, layerwise.make_online_process_loader
    _ = meta.SKIP_TENSORS, sanitize.restore_layer_refs
    _ = unquantized_fused_moe_method.UnquantizedFusedMoEMethod, modular_kernel.FusedMoEExperts
    if not hasattr(attention, "is_deferred_attention_layer"):
        _ = attention.Attention, attention.MLAAttention


class StagingModel(torch.nn.Module):
    """A vLLM model's weights before post-processing, under the model's names, in a separate arena on `device`."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device | str) -> None:
        """Allocate as many bytes as the weights had before vLLM post-processed them.

        Raises:
            ConfigError: some parameters of a layer have no shape until they are loaded.
            DeviceOutOfMemory, DestinationError: there is not enough memory.
        """
        super().__init__()
        self._vllm_config = vllm_config
        # The tuple prevents torch from registering the model as a submodule.
        self._model = (model,)
        self._loaded: set[str] = set()
        formats = {name: _loader_format(name, layer) for name, layer in model.named_modules()}
        nbytes = needed_bytes(_span_bytes(form) for forms in formats.values() for form in forms.values())
        arena = Arena.allocate(nbytes, device)
        self.device = torch.device(arena.device)
        self._storage = arena.bytes_at(0, nbytes).untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._layers = [
            _StagedLayer(name, layer, _made_real(self, name, formats[name], arena))
            for name, layer in model.named_modules()
            if formats[name]
        ]

    def free(self) -> None:
        """Free the memory and discard its contents. Use the model again only after `allocate`. Idempotent."""
        # Host memory cannot be freed in place, because other processes may have mapped it.
        if self._storage.resizable():
            self._storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again after `free`. Idempotent."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own loader with the staging model as its destination, and return the loader's result.

        The model must not run at the same time, because its layers have the staging tensors until the loader returns.
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
        """Return, by tensor, the number of elements that an update leaves unfilled.

        Completely filled tensors are omitted.
        """
        if not wanted.unrecorded:
            return wanted.unfilled
        # Unrecorded tensors pass through the loader at each update. The loader returns the names of the tensors that it
        # fills.
        return {name: count for name, count in wanted.unfilled.items() if name not in self._loaded}

    def check(self, wanted: Requirements, *, strict: bool = True) -> None:
        """Check that an update can be installed, before the serving model changes.

        Args:
            wanted: requirements of the subscriber, which determine the tensors that the update fills.
            strict: require that every parameter of the model is filled, except the scales of attention layers.

        Raises:
            ConfigError: vLLM combined two published tensors into one, or it cannot reload a layer.
            PlanError: no rank publishes some parameters. The message lists these parameters.
        """
        unfilled = self.unfilled(wanted)
        sources = self._sources(unfilled)
        whole = {name for name in sources if unfilled.get(name, 0) in (0, sources[name].numel())}
        lacking = [name for layer in self._layers for name in layer.lacking(whole)]
        if lacking and strict:
            more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
            hint = 'set "strict": false in init_info if these parameters should keep their values'
            raise PlanError(f"no rank publishes {', '.join(lacking[:_LISTED])}{more}", hint=hint)
        for layer in self._layers:
            layer.check(sources)

    @torch.no_grad()
    def install(self, wanted: Requirements) -> None:
        """Install the tensors that an update filled into the serving model. All other tensors stay unchanged.

        Call `check` first. The model must not run during `install`. After an error the model has no complete version.
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
        # vLLM's reload does not pack these experts, so pack them from the reloaded parameters.
        for layer in self._layers:
            if layer.is_among(sources) and (experts := _experts_to_pack(layer.live)) is not None:
                experts.process_weights_after_loading(layer.live)

    def not_installed(self, wanted: Requirements) -> list[torch.nn.Parameter]:
        """Return the serving model's parameters that `install` leaves unchanged."""
        sources = self._sources(self.unfilled(wanted))
        # vLLM processes and copies complete layers, except for tensors that it leaves in place.
        rewritten = {
            id(tensor)
            for layer in self._layers
            if layer.is_among(sources)
            for name, tensor in layer.live._parameters.items()
            if name not in _not_loaded() or layer.name_of(name) in sources
        }
        (model,) = self._model
        return [tensor for tensor in model.parameters() if id(tensor) not in rewritten]

    def _sources(self, unfilled: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return each filled tensor's source: its own staging tensor, or the staging tensor of a tied tensor."""
        # A layer that shares a tensor with another layer (`lm_head` with the embeddings) may have processed its copy
        # separately, so reload a tied tensor in each of its layers.
        sources: dict[str, torch.Tensor] = {}
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
                sources[whole] = staging
                if place is not None and (other := names.setdefault(place, whole)) != whole:
                    raise ConfigError(
                        f"vLLM holds {whole} and {other} as one tensor, but both are published",
                        hint="set tie_word_embeddings in the model's config to the trainer's value",
                    )
        return sources | {whole: sources[names[place]] for whole, place in shared if place in names}


class _StagedLayer:
    """A layer of the model, with a module that has the layer's tensors in the layout that the loader fills."""

    def __init__(self, name: str, live: torch.nn.Module, staging: torch.nn.Module) -> None:
        self.live = live
        self.staging = staging
        self._prefix = f"{name}." if name else ""

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield each non-empty tensor's name in the layer and the tensor's name in the model."""
        for name, tensor in (*self.staging._parameters.items(), *self.staging._buffers.items()):
            if tensor is not None and tensor.numel():
                yield name, self._prefix + name

    def name_of(self, name: str) -> str:
        return self._prefix + name

    def is_among(self, filled: Collection[str]) -> bool:
        """Return whether an update fills any tensor in this layer, so that the layer has to be processed again."""
        return any(whole in filled for _, whole in self.names())

    def lacking(self, filled: Collection[str]) -> list[str]:
        """Return the parameters that are not filled, except the scales of an attention layer's cache."""
        if _is_attention(self.live):
            return []
        return [whole for name, whole in self.names() if name in self.staging._parameters and whole not in filled]

    def check(self, filled: Collection[str]) -> None:
        """Raise ConfigError if the layer is only partly filled, or cannot be processed again."""
        from vllm.model_executor.model_loader.reload import meta

        if not self.is_among(filled):
            return
        _experts_to_pack(self.live)
        lacking = [whole for whole in self.lacking(filled) if whole.rpartition(".")[2] not in meta.SKIP_TENSORS]
        if lacking:
            raise ConfigError(f"vLLM only processes complete layers, but no rank publishes {lacking} of this layer")

    @contextlib.contextmanager
    def uses_staging_tensors(self) -> Iterator[None]:
        """Replace the live layer's tensors with the staging model's for the duration of a block."""
        # A tensor may also be a plain attribute of the layer, and the attribute would hide the replacement.
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
                # A loader may replace a parameter. Store the new parameter, so that the recording uses the new one.
                staging.update({name: group[name] for name in staging if group.get(name) is not None})
                group.clear()
                group.update(before)
            own.update(hiding)


@contextlib.contextmanager
def _reloaded(layer: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    """Pass one complete tensor of a layer to vLLM's reload. After the layer's last tensor, vLLM processes the layer."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    target = getattr(layer, name)
    if name in _not_loaded():
        target.data.copy_(value)
        yield
        return
    # The tensor's loader has already processed the staging values, so copy them unchanged.
    before = _own_loader(target.weight_loader)
    target.weight_loader = default_weight_loader
    try:
        layerwise.make_online_process_loader(layer, name)(target, value)
        yield
    finally:
        target.weight_loader = before


def _experts_to_pack(layer: torch.nn.Module) -> Any | None:
    """Return a layer's experts if they pack their own weights, or None if vLLM's reload is sufficient."""
    # vLLM's reload does not pack experts that are not quantised.
    from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, unquantized_fused_moe_method.UnquantizedFusedMoEMethod):
        return None
    experts = getattr(method.moe_kernel, "fused_experts", None)
    packing = getattr(type(experts), "process_weights_after_loading", None)
    if packing in (None, modular_kernel.FusedMoEExperts.process_weights_after_loading):
        return None
    # Before vLLM 0.28 there is no such class, and vLLM's reload packs these experts.
    if not any(base.__name__ == "CPUUnquantizedExperts" for base in type(experts).__mro__):
        raise ConfigError(f"vLLM does not pack the weights of {type(experts).__name__} when it reloads them")
    return experts


def _not_loaded() -> Collection[str]:
    """Return the names of tensors that vLLM's reload leaves in place."""
    from vllm.model_executor.model_loader.reload import meta

    # Since vLLM 0.27, `SKIP_TENSORS` also has biases, which stay in place but are loaded.
    names: set[str] = getattr(meta, "SKIP_LOAD_TENSORS", meta.SKIP_TENSORS)
    return names


def _is_attention(layer: torch.nn.Module) -> bool:
    """Return whether vLLM processes a layer after all other layers, because it is an attention layer."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    # Before vLLM 0.28, the reload compares these two classes.
    return isinstance(layer, (attention.Attention, attention.MLAAttention))


def _loader_format(where: str, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's tensors in their state before loading, on the meta device.

    Tensors that vLLM never moves to the meta device are returned as they are in the live layer.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    live = {name: tensor for name, tensor in (layer._parameters | layer._buffers).items() if tensor is not None}
    forms = {name: sanitize.restore_layer_refs(form, layer) for name, form in (parameters | buffers).items()}
    forms |= {name: tensor for name, tensor in live.items() if name in meta.SKIP_TENSORS}
    for name, form in forms.items():
        if torch.nn.parameter.is_lazy(form):
            raise ConfigError(f"{where}.{name} has no shape before it is loaded, so it cannot be received")
    return forms


def _made_real(root: torch.nn.Module, path: str, formats: Mapping[str, torch.Tensor], arena: Arena) -> torch.nn.Module:
    """Return the module under `root` with this dotted name, with zeroed tensors of these formats in the arena."""
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    for name, form in formats.items():
        nbytes = _span_bytes(form)
        (offset,) = arena.place([nbytes])
        tensor = arena.bytes_at(offset, nbytes).zero_().view(form.dtype).as_strided(form.shape, form.stride())
        # vLLM materialises a layer in the same way. Loaders use the parameter's class and attributes, such as
        # `weight_loader` and the sharded dims.
        tensor.__class__ = form.__class__
        tensor.__dict__ = _attributes(form)
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def _attributes(form: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's attributes, with its original loaders instead of the wrappers of a reload."""
    loaders = {name: form.__dict__[name] for name in ("weight_loader", "_weight_loader") if name in form.__dict__}
    return form.__dict__ | {name: _own_loader(loader) for name, loader in loaders.items()}


def _own_loader(loader: Any) -> Any:
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last element."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
