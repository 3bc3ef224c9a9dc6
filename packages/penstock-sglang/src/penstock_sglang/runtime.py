"""The settings of this SGLang process, by the names of each release of SGLang.

Since 0.5.17, SGLang's modules read groups of settings. Before, they read all arguments of the server. `plugin` and
`sleep` read settings only through this module, which can be imported without SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def require() -> None:
    """Check that this version of SGLang has the settings. Raise ImportError or AttributeError if it does not."""
    from sglang.srt import runtime_context

    _ = runtime_context.get_parallel
    if not (hasattr(runtime_context, "get_model") and hasattr(runtime_context, "get_exec")):
        _ = runtime_context.get_server_args


def load_format() -> object:
    """Return the `--load-format` of this process."""
    return _group("get_model").load_format


def extra_config() -> Mapping[str, Any]:
    """Return the `--model-loader-extra-config` of this process."""
    extra = _group("get_model").model_loader_extra_config or {}
    return json.loads(extra) if isinstance(extra, str) else extra


def may_release() -> bool:
    """Return whether this process may release the memory of its weights."""
    group = _group("get_exec")
    return bool(getattr(group, "features", group).enable_memory_saver)


def parallel() -> Any:
    """Return this process's ranks and groups."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _group(name: str) -> Any:
    """Return the group of settings from a function of SGLang, or all arguments of the server before 0.5.17."""
    from sglang.srt import runtime_context

    return getattr(runtime_context, name if hasattr(runtime_context, name) else "get_server_args")()
