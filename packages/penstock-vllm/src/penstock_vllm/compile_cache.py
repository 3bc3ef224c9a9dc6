"""Restore vLLM's compiled code before its workers start, and save it after their warm-up.

vLLM creates the executor in the engine core's process before it starts the workers, which inherit that process's
environment. Ray workers on other hosts do not inherit the engine core's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import penstock_compile_cache
from penstock import ConnectionSettings
from penstock.errors import PenstockError, SourceError
from penstock.spi import FleetOptions, Log, Phases, Settings, connection_of, patch_once, read_options, texts_of
from penstock_compile_cache import Restored
from penstock_vllm.patches import loads_by


def carry(executor: type[Any], load_format: str, log: Callable[[], Log]) -> None:
    """Make an executor restore compiled code before its workers start, and save it after their warm-up.

    `executor` is vLLM's base class of executors. Engines with a different load format keep vLLM's behaviour.
    """

    def construct(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        vllm_config: Any = arguments[0] if arguments else named.get("vllm_config")
        if loads_by(vllm_config, load_format):
            options = read_options(vllm_config.load_config.model_loader_extra_config or {})
            if options.get("compile_cache"):
                self._penstock_compile_cache = _restore(vllm_config, options, log())
        original(self, *arguments, **named)

    def warm_up(original: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        # Save only once, because vLLM calls this method again after a sleep.
        restored, self._penstock_compile_cache = getattr(self, "_penstock_compile_cache", None), None
        if restored is not None and not restored.is_found and Settings.read().compile_cache_signing_key is not None:
            options = read_options(self.vllm_config.load_config.model_loader_extra_config)
            _save(self.vllm_config, options, restored, log())
        return result

    step = "compile_or_warm_up_model"
    allocate = getattr(executor, "initialize_from_config", None)
    # Before vLLM 0.27, this method allocates the cache and then calls this step of the workers by name.
    if not hasattr(executor, step) and allocate is not None and step in allocate.__code__.co_consts:
        step = allocate.__name__
    patch_once(executor, **{"__init__": construct, step: warm_up})


def _restore(vllm_config: Any, options: Mapping[str, Any], log: Log) -> Restored | None:
    """Restore the code for this configuration.

    If the model cannot be opened, return None, because vLLM itself reports this error.
    """
    from vllm.platforms import current_platform

    where = _where(vllm_config, options)
    with Phases("restore compiled code", journey="engine"):
        try:
            restored = penstock_compile_cache.restore(
                engine="vllm",
                config={"vllm_config": vllm_config.compute_hash()},
                device="cuda" if current_platform.is_cuda_alike() else "cpu",
                connection=_connection(options, where["uri"]),
                **where,
            )
        except SourceError as error:
            log.warning("penstock: compiled code was not restored: %s", error)
            return None
    log.info("penstock: %s", restored)
    return restored


def _save(vllm_config: Any, options: Mapping[str, Any], restored: Restored, log: Log) -> None:
    """Save the compiled code. If saving fails, the engine still serves."""
    with Phases("save compiled code", journey="engine"):
        try:
            log.info("penstock: %s", penstock_compile_cache.save(key=restored.key, **_where(vllm_config, options)))
        except PenstockError as error:
            log.error("penstock: compiled code was not saved: %s", error)


def _where(vllm_config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `restore` and `save` share: model, bundles' directory and storage options."""
    model = vllm_config.model_config
    uri = texts_of(getattr(model, "model_weights", "") or model.model)[0]
    if uri.startswith("hf://") and model.revision:
        uri += f"@{model.revision}"
    at = options["compile_cache"]
    return {
        "uri": uri,
        "at": at if isinstance(at, str) else None,
        "storage_options": options.get("storage_options"),
    }


def _connection(options: Mapping[str, Any], model: str) -> ConnectionSettings | None:
    """Return the connection to the replica's fleet, or None if the replica joins no fleet."""
    if FleetOptions.read(options, model) is None:
        return None
    # The replica uses the configured ports later, so this member uses free ports.
    return connection_of(options, rank=1)
