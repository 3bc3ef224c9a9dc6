"""Changes to vLLM: prefix caches by version, replies in step, phases, compiled functions, object stores, adapters.

In: classes and modules of vLLM. Out: the same, with functions wrapped, for one load format or weight-transfer backend:
others are left alone. vLLM need not be installed to import this.
Not here: when they are applied (`plugin.register`).

Each function may be called again: it changes a class once. A class that lacks a method is left as it was, with an
AttributeError (`patch_once`). Engines that do not use Penstock get their own calls with their own arguments. Written
for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from penstock.spi import ADAPTERS, Phases, patch_once

_MARK = "\x1fweights "
"""Between the client's part of a salt and ours. A control character, which no client's salt has by accident."""


def loads_by(config: Any, load_format: str) -> bool:
    """Return whether an engine's weights are loaded by `load_format`."""
    return getattr(getattr(config, "load_config", None), "load_format", None) == load_format


def is_sent_by(config: Any, backend: str) -> bool:
    """Return whether new versions of an engine's weights come by `backend`."""
    return getattr(getattr(config, "weight_transfer_config", None), "backend", None) == backend


def salt_of(own: str | None, version: str) -> str:
    """Return the salt of a request: the client's (or what this made of it before), and the version of the weights."""
    return f"{(own or '').partition(_MARK)[0]}{_MARK}{version}"


def salt_requests(core: type[Any], backend: str) -> None:
    """Salt the requests of vLLM's engine core with the version of the weights, where weights come by `backend`."""
    # vLLM hashes a request's salt into each of its blocks. It salts by what the client says, and resets its own cache
    # in some modes of a pause only: requests kept over an update, and blocks in an external connector, would match keys
    # and values that another version computed. Blocks of old versions are not dropped here: `/pause` does, or they age.
    _ = core.get_weight_version  # The replacements call it.

    def applies(engine: Any) -> bool:
        return is_sent_by(engine.vllm_config, backend)

    def preprocess(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if applies(self):
            request.cache_salt = salt_of(request.cache_salt, self.get_weight_version())
        return original(self, request, *arguments, **named)

    def add(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        # The version may have changed since another thread preprocessed the request.
        if applies(self):
            _salt(request, self.get_weight_version())
        return original(self, request, *arguments, **named)

    def set_version(original: Any, self: Any, weight_version: str) -> None:
        original(self, weight_version)
        if applies(self):
            for request in self.scheduler.requests.values():
                # Requests that wait, or will be computed anew. The others have blocks of the old version already.
                if request.num_computed_tokens == 0:
                    _salt(request, weight_version)

    patch_once(core, preprocess_add_request=preprocess, add_request=add, set_weight_version=set_version)


def _salt(request: Any, version: str) -> None:
    """Salt a request of the scheduler's, and hash its blocks again if that changes them."""
    salt = salt_of(request.cache_salt, version)
    if salt != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes = []
        request.update_block_hashes()


def receive_all_replies(executor: type[Any], backend: str) -> None:
    """Have an executor receive the replies of all workers when one fails, where weights come by `backend`."""
    # vLLM 0.32 raises at the first worker that failed and leaves the replies of those after it in their queues,
    # untagged: the next call would read the replies of this one. Source: github.com/vllm-project/vllm/pull/57846.
    signature = inspect.signature(executor.collective_rpc)

    def call_all(call: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        if not is_sent_by(self.vllm_config, backend):
            return call(self, *arguments, **named)
        asked = signature.bind(self, *arguments, **named).arguments
        # Calls that do not block, or that one rank answers, read the queues in other ways.
        if asked.get("non_block") or asked.get("unique_reply_rank") is not None:
            return call(self, *arguments, **named)
        timeout = asked.get("timeout")
        queues = self.response_mqs
        wrapped = self.response_mqs = [_ReplyQueue(queue) for queue in queues]
        try:
            return call(self, *arguments, **named)
        except RuntimeError:
            # If no queue was read, the call may not have been sent at all, and then no worker answers it.
            if any(queue.was_read for queue in wrapped):
                for queue in wrapped:
                    if not queue.was_read:
                        queue.dequeue(timeout=timeout)
            raise
        finally:
            # Unless vLLM has replaced the queues meanwhile.
            if self.response_mqs is wrapped:
                self.response_mqs = queues

    patch_once(executor, collective_rpc=call_all)


class _ReplyQueue:
    """A worker's queue of replies, with a note of whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.was_read = False

    def dequeue(self, *arguments: Any, **named: Any) -> Any:
        """Return the next reply of the worker."""
        reply = self._queue.dequeue(*arguments, **named)
        self.was_read = True
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def name_newest_adapter(models: type[Any]) -> None:
    """Let requests name an adapter without its version: `policy` is the newest `policy@N` that Penstock has loaded."""

    # Clients of RL frameworks have one name for the model. vLLM has no second name for an adapter, and to load each
    # version under one name would give requests that run another version's weights.
    async def load(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        answer = await original(self, request, *arguments, **named)
        short, mark, _ = request.lora_name.rpartition("@")
        if isinstance(answer, str) and mark and ADAPTERS in request.lora_path:
            loaded = self.lora_requests.get(request.lora_name)
            if loaded is not None:
                self.lora_requests[short] = loaded
        return answer

    async def unload(original: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        short = request.lora_name.rpartition("@")[0]
        newest = self.lora_requests.get(short) if short else None
        answer = await original(self, request, *arguments, **named)
        if isinstance(answer, str) and newest is not None and newest.lora_name == request.lora_name:
            self.lora_requests.pop(short, None)
        return answer

    patch_once(models, load_lora_adapter=load, unload_lora_adapter=unload)


STEPS = {
    "init_device": "init device",
    "load_model": "load model",
    "determine_available_memory": "profile memory",
    "initialize_from_config": "allocate cache",
    "compile_or_warm_up_model": "warm up",
}
"""Methods of vLLM's workers that make up a start, in order, with the names of their phases."""
_LAST_STEP = "compile_or_warm_up_model"


def report_phases(worker: type[Any], load_format: str) -> None:
    """Report the start of each worker as phases of its process, where weights are loaded by `load_format`."""

    # The constructor, and not the methods: each platform's class has its own methods, and all call this constructor.
    def construct(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if loads_by(self, load_format) and hasattr(self, _LAST_STEP):
            _report_start(self)

    patch_once(worker, __init__=construct)


def _report_start(worker: Any) -> None:
    """Report a worker's start, from now until its last step: the process is not ready between the steps either."""
    start = Phases("start", journey="engine")
    for method, name in STEPS.items():
        if hasattr(worker, method):
            patch_once(worker, **{method: _reported(worker, method, name, start)})


def _reported(worker: Any, method: str, name: str, start: Phases) -> Callable[..., Any]:
    """Return what replaces a method of a worker until its start is over: it reports a phase."""

    def reported(original: Any, *arguments: Any, **named: Any) -> Any:
        try:
            with Phases(name, journey="engine"):
                result = original(*arguments, **named)
        except BaseException as error:
            start.fail(error)
            raise
        if method == _LAST_STEP:
            start.stop()
            # vLLM calls some of them again while it serves, as after a sleep: those are no start.
            for step in STEPS:
                vars(worker).pop(step, None)
        return result

    return reported


def load_functions_of_torch(decorators: Any, load_format: str) -> None:
    """Let vLLM load what torch's own backend compiled ahead of time, where weights are loaded by `load_format`.

    Args:
        decorators: the module `vllm.compilation.decorators`.
        load_format: engines with another load format are left alone.
    """
    # vLLM 0.32 ends each load by `finalize_loading` of the function, which only functions of its own backend have. On
    # the CPU, where the backend is torch's, it gave the function up and traced the model again: 9 of 24 s of a start.
    if not hasattr(decorators, "_try_load_aot_compiled_fn"):
        return

    def try_load(original: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if loads_by(getattr(model, "vllm_config", None), load_format):
            from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as OfTorch

            if not hasattr(OfTorch, "finalize_loading"):
                # There is nothing to finish: what it loads is complete.
                setattr(OfTorch, "finalize_loading", lambda self, vllm_config: None)  # noqa: B010
        return original(model, *arguments, **named)

    patch_once(decorators, _try_load_aot_compiled_fn=try_load)


def accept_object_stores(load_format: str) -> None:
    """Let vLLM take models in object stores with this load format.

    It gives vLLM the functions that it takes from Run:ai Model Streamer, if that is not installed (they pull config and
    tokenizer), and lets vLLM's check of load formats pass this one. If a version of vLLM lacks the names changed here,
    its own errors say so.
    """
    from vllm.config import VllmConfig
    from vllm.transformers_utils import runai_utils

    from penstock_hf import runai_streamer

    if importlib.util.find_spec("runai_model_streamer") is None:
        # vLLM holds placeholders there that only raise.
        for name, function in (
            ("runai_pull_files", runai_streamer.pull_files),
            ("runai_list_safetensors", runai_streamer.list_safetensors),
        ):
            if hasattr(runai_utils, name):
                setattr(runai_utils, name, function)
    if not hasattr(VllmConfig, "try_verify_and_update_config"):
        return

    def verify(original: Any, self: Any) -> Any:
        """Run vLLM's own check, without the object store's URI if the load format is ours."""
        # vLLM's check refuses object stores to load formats that it does not list.
        model: Any = getattr(self, "model_config", None)
        load = getattr(self, "load_config", None)
        weights = getattr(model, "model_weights", "")
        if not weights or getattr(load, "load_format", "") != load_format:
            return original(self)
        model.model_weights = ""
        try:
            return original(self)
        finally:
            model.model_weights = weights

    patch_once(VllmConfig, try_verify_and_update_config=verify)
