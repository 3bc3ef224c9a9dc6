"""Patches for vLLM's classes, each for one load format or weight-transfer backend.

Each function may be called repeatedly, because it patches a class only once. If a class lacks a method, the class stays
unchanged and `patch_once` raises AttributeError. In engines that do not use Penstock, patched methods behave as before.
This module can be imported without vLLM.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from penstock.spi import ADAPTERS, Phases, patch_once

_MARK = "\x1fweights "
"""Separator between the client's salt and Penstock's. No client's salt contains this control character by accident."""


def loads_by(config: Any, load_format: str) -> bool:
    """Return whether an engine's weights are loaded by `load_format`."""
    return getattr(getattr(config, "load_config", None), "load_format", None) == load_format


def is_sent_by(config: Any, backend: str) -> bool:
    """Return whether an engine receives new versions of its weights through `backend`."""
    return getattr(getattr(config, "weight_transfer_config", None), "backend", None) == backend


def check_stores(owner: type[Any], name: str) -> None:
    """Raise AttributeError if no constructor of a class sets or reads an attribute with this name."""
    constructors = [inspect.unwrap(vars(base)["__init__"]) for base in owner.__mro__[:-1] if "__init__" in vars(base)]
    if not any(name in construct.__code__.co_names for construct in constructors):
        raise AttributeError(f"objects of {owner.__name__!r} have no attribute {name!r}")


def salt_of(own: str | None, version: str) -> str:
    """Return a request's salt: the client's salt, then the version of the weights.

    The client's salt in `own` may already end with a version.
    """
    return f"{(own or '').partition(_MARK)[0]}{_MARK}{version}"


def add_weight_version(core: type[Any], backend: str) -> None:
    """Add the version of the weights to vLLM's engine core, if vLLM has none (before 0.27) and `backend` sends them."""
    # If only one of the methods is missing, a newer vLLM has renamed it, and `salt_requests` reports the missing name.
    if hasattr(core, "get_weight_version") or hasattr(core, "set_weight_version"):
        return

    def call(
        original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **named: Any
    ) -> Any:
        replies = original(self, method, timeout, args, kwargs, **named)
        if is_sent_by(self.vllm_config, backend):
            # A failed call does not get here.
            if method == "update_weights":
                (info,) = args or ((kwargs or {})["update_info"],)
                self._penstock_received = str(info["version"])
            elif method == "finish_weight_update":
                self.set_weight_version(self._penstock_received)
        return replies

    def set_version(self: Any, weight_version: str) -> None:
        self._weight_version = weight_version

    def get_version(self: Any) -> str:
        version: str = self._weight_version
        return version

    patch_once(core, collective_rpc=call)
    names = {"_weight_version": "default", "set_weight_version": set_version, "get_weight_version": get_version}
    for name, value in names.items():
        setattr(core, name, value)


def run_updates_in_engine(worker: type[Any], backend: str) -> None:
    """Let the weight-transfer engine of `backend` run whole updates, as vLLM does since 0.25.

    vLLM 0.24 gives the engine only the second of an update's three steps, and removes the model's weights in the first.
    """

    def construct(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if is_sent_by(getattr(self, "vllm_config", None), backend) and hasattr(self, "finish_weight_update"):
            patch_once(self, **_steps_of(self))

    # `report_phases` explains why the constructor is patched.
    patch_once(worker, __init__=construct)


def _steps_of(worker: Any) -> dict[str, Callable[..., Any]]:
    """Return the replacements for a worker's methods that load the model, start an update, and finish the update."""

    def load(original: Any, *arguments: Any, **named: Any) -> Any:
        from vllm.config import set_current_vllm_config

        # The worker creates the engine here, and gives the engine only a part of the configuration.
        with set_current_vllm_config(worker.vllm_config):
            return original(*arguments, **named)

    def start(original: Any, *_: Any, **__: Any) -> Any:
        # With this argument, vLLM leaves the model as it is.
        result = original(is_checkpoint_format=False)
        try:
            worker.weight_transfer_engine.start_weight_update()
        except BaseException:
            # The update did not start, so the next one may.
            worker._weight_update_active = False
            raise
        return result

    def finish(original: Any) -> Any:
        worker.weight_transfer_engine.finish_weight_update()
        return original()

    return {"load_model": load, "start_weight_update": start, "finish_weight_update": finish}


def salt_requests(core: type[Any], backend: str) -> None:
    """Salt the requests in vLLM's engine core with the version of the weights, if `backend` sends the weights."""
    # vLLM includes a request's salt in the hash of each block. If the salt had no version, requests that survive an
    # update, and blocks in an external connector, would match keys and values from a different version.
    _ = core.get_weight_version  # Fail now if vLLM lacks this method.
    check_stores(core, "vllm_config")

    def applies(engine: Any) -> bool:
        return is_sent_by(engine.vllm_config, backend)

    def preprocess(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if applies(self):
            request.cache_salt = salt_of(request.cache_salt, self.get_weight_version())
        return original(self, request, *arguments, **named)

    def add(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        # The version may have changed after a different thread preprocessed the request.
        if applies(self):
            _salt(request, self.get_weight_version())
        return original(self, request, *arguments, **named)

    def set_version(original: Any, self: Any, weight_version: str, *arguments: Any, **named: Any) -> None:
        original(self, weight_version, *arguments, **named)
        if applies(self):
            for request in self.scheduler.requests.values():
                # Requests with computed tokens already have blocks from the old version.
                if request.num_computed_tokens == 0:
                    _salt(request, weight_version)

    patch_once(core, preprocess_add_request=preprocess, add_request=add, set_weight_version=set_version)


def _salt(request: Any, version: str) -> None:
    """Salt a request in the scheduler, and rehash its blocks if the salt changed."""
    salt = salt_of(request.cache_salt, version)
    if salt != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes = []
        request.update_block_hashes()


def receive_all_replies(executor: type[Any], backend: str) -> None:
    """If `backend` sends the weights, receive the replies of all workers even after one worker fails."""
    # vLLM 0.32 raises at the first failed worker and leaves the other workers' replies, which have no tag, in their
    # queues. The next call would read them as its own replies. Source: github.com/vllm-project/vllm/pull/57846.
    signature = inspect.signature(executor.collective_rpc)
    check_stores(executor, "vllm_config")

    def call_all(call: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        if not is_sent_by(self.vllm_config, backend):
            return call(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named).arguments
        # Calls that do not block, or that expect a reply from only one rank, read the queues differently.
        if bound.get("non_block") or bound.get("unique_reply_rank") is not None:
            return call(self, *arguments, **named)
        timeout = bound.get("timeout")
        queues = self.response_mqs
        wrapped = self.response_mqs = [_ReplyQueue(queue) for queue in queues]
        try:
            return call(self, *arguments, **named)
        except RuntimeError:
            # If no queue was read, vLLM may not have sent the call at all, and then no worker replies.
            if any(queue.was_read for queue in wrapped):
                for queue in wrapped:
                    if not queue.was_read:
                        queue.dequeue(timeout=timeout)
            raise
        finally:
            # vLLM may have replaced the queues during the call.
            if self.response_mqs is wrapped:
                self.response_mqs = queues

    patch_once(executor, collective_rpc=call_all)


class _ReplyQueue:
    """A worker's reply queue that records whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.was_read = False

    def dequeue(self, *arguments: Any, **named: Any) -> Any:
        reply = self._queue.dequeue(*arguments, **named)
        self.was_read = True
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def name_newest_adapter(models: type[Any]) -> None:
    """Let requests name an adapter without its version. `policy` means the newest `policy@N` that Penstock loaded."""

    check_stores(models, "lora_requests")

    # Clients of RL frameworks use one name for the model, and vLLM has no aliases for adapters. If every version had
    # the same name, running requests would continue with the weights of a different version.
    async def load(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        reply = await original(self, request, *arguments, **named)
        name = getattr(request, "lora_name", "")
        short, mark, _ = name.rpartition("@")
        if isinstance(reply, str) and mark and ADAPTERS in request.lora_path:
            loaded = self.lora_requests.get(name)
            if loaded is not None:
                self.lora_requests[short] = loaded
        return reply

    async def unload(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        name = getattr(request, "lora_name", "")
        short = name.rpartition("@")[0]
        newest = self.lora_requests.get(short) if short else None
        reply = await original(self, request, *arguments, **named)
        if isinstance(reply, str) and newest is not None and newest.lora_name == name:
            self.lora_requests.pop(short, None)
        return reply

    patch_once(models, load_lora_adapter=load, unload_lora_adapter=unload)


STEPS = {
    "init_device": "init device",
    "load_model": "load model",
    "determine_available_memory": "profile memory",
    "initialize_from_config": "allocate cache",
    "compile_or_warm_up_model": "warm up",
}
"""The methods of vLLM's workers that start a worker, in order, with the names of their phases."""
_LAST_STEP = "compile_or_warm_up_model"


def report_phases(worker: type[Any], load_format: str) -> None:
    """If `load_format` loads the weights, report each worker's start as phases of its process."""

    # Each platform has its own worker class with its own methods, but all of the classes call this constructor.
    def construct(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if loads_by(self, load_format) and hasattr(self, _LAST_STEP):
            _report_start(self)

    patch_once(worker, __init__=construct)


def _report_start(worker: Any) -> None:
    """Report a worker's start from now until its last step.

    Between two steps, the process is still reported as not ready.
    """
    start = Phases("start", journey="engine")
    for method, name in STEPS.items():
        if hasattr(worker, method):
            patch_once(worker, **{method: _reported(worker, method, name, start)})


def _reported(worker: Any, method: str, name: str, start: Phases) -> Callable[..., Any]:
    """Return a replacement for a worker's method that also reports a phase.

    The replacement is removed when the worker has started.
    """

    def reported(original: Any, *arguments: Any, **named: Any) -> Any:
        try:
            with Phases(name, journey="engine"):
                result = original(*arguments, **named)
        except BaseException as error:
            start.fail(error)
            raise
        if method == _LAST_STEP:
            start.stop()
            # Restore the methods. vLLM calls some of them again while it serves, for example after a sleep, which is
            # not a start.
            for step in STEPS:
                vars(worker).pop(step, None)
        return result

    return reported


def load_functions_of_torch(decorators: Any, load_format: str) -> None:
    """Let vLLM load functions that torch's own backend compiled ahead of time, if `load_format` loads the weights.

    `decorators` is the module `vllm.compilation.decorators`.
    """
    # vLLM 0.32 calls `finalize_loading` on each loaded function, but only functions from its own backend have this
    # method. On the CPU, which uses torch's backend, vLLM therefore discarded the function and traced the model again
    # (9 of a start's 24 s).
    if not hasattr(decorators, "_try_load_aot_compiled_fn"):
        return

    def try_load(original: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if loads_by(getattr(model, "vllm_config", None), load_format):
            from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as OfTorch

            if not hasattr(OfTorch, "finalize_loading"):
                # Functions from torch's backend need no finalization.
                setattr(OfTorch, "finalize_loading", lambda self, vllm_config: None)  # noqa: B010
        return original(model, *arguments, **named)

    patch_once(decorators, _try_load_aot_compiled_fn=try_load)


def accept_object_stores(load_format: str) -> None:
    """Let vLLM accept models in object stores with this load format.

    vLLM reads the config and the tokenizer with functions from the Run:ai Model Streamer. If the Model Streamer is not
    installed, vLLM uses Penstock's functions instead.
    """
    from vllm.config import VllmConfig
    from vllm.transformers_utils import runai_utils

    from penstock_hf import runai_streamer

    if importlib.util.find_spec("runai_model_streamer") is None:
        # Without the Model Streamer, vLLM has placeholders under these names that only raise errors.
        for name, function in (
            ("runai_pull_files", runai_streamer.pull_files),
            ("runai_list_safetensors", runai_streamer.list_safetensors),
        ):
            if hasattr(runai_utils, name):
                setattr(runai_utils, name, function)
    if not hasattr(VllmConfig, "try_verify_and_update_config"):
        return

    def verify(original: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        # vLLM allows object stores only for the load formats that it lists, so hide the URI from its check.
        model: Any = getattr(self, "model_config", None)
        load = getattr(self, "load_config", None)
        weights = getattr(model, "model_weights", "")
        if not weights or getattr(load, "load_format", "") != load_format:
            return original(self, *arguments, **named)
        model.model_weights = ""
        try:
            return original(self, *arguments, **named)
        finally:
            model.model_weights = weights

    patch_once(VllmConfig, try_verify_and_update_config=verify)
