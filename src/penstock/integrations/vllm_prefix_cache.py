"""A version of the weights never meets keys and values that another version computed, in vLLM's caches or beyond them.

In: vLLM's engine core, in its process; the version that a weight update ends with. Out: requests whose cache salt names
the version they are computed with.
Not here: dropping blocks that no request will use again: `/pause` does, and otherwise they age out.

vLLM hashes a request's salt into each of its blocks. It salts by what the client says, and resets its own cache in some
modes of a pause; requests kept over an update, and blocks in an external connector, would match across versions.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "\x1fweights "


def salt_of(own: str | None, version: str) -> str:
    """A request's salt, of what its client said (or what this made of it before) and the version of the weights."""
    return f"{(own or '').partition(_MARK)[0]}{_MARK}{version}"


def salt_requests(core: type[Any], backend: str) -> None:
    """Have this class of vLLM's engine core salt requests where weights come by `backend`; again is harmless."""
    if hasattr(core, "_penstock_salts"):
        return
    core._penstock_salts = True
    preprocess, add, set_version = core.preprocess_add_request, core.add_request, core.set_weight_version

    def applies(engine: Any) -> bool:
        config = engine.vllm_config.weight_transfer_config
        return config is not None and config.backend == backend

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if applies(self):
            request.cache_salt = salt_of(request.cache_salt, self.get_weight_version())
        return preprocess(self, request)

    @functools.wraps(add)
    def add_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if applies(self):  # the version may have changed since another thread made the request
            _salt(request, self.get_weight_version())
        return add(self, request, *arguments, **named)

    @functools.wraps(set_version)
    def set_weight_version(self: Any, weight_version: str) -> None:
        set_version(self, weight_version)
        if applies(self):
            for request in self.scheduler.requests.values():
                if request.num_computed_tokens == 0:  # waiting, or to be computed anew
                    _salt(request, weight_version)

    core.preprocess_add_request, core.add_request = preprocess_add_request, add_request
    core.set_weight_version = set_weight_version


def _salt(request: Any, version: str) -> None:
    """Salt a request of the scheduler's, and hash its blocks anew where that changes them."""
    salt = salt_of(request.cache_salt, version)
    if salt != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes = []
        request.update_block_hashes()
