"""Compiled code that travels with weights: what engines compiled once, in signed bundles that others unpack.

In: a model, an engine and its configuration. Out: `restore`, `save`, `list_bundles`, and their reports.
Not here: the caches themselves (`caches`), the format (`bundle`).
"""

from penstock_compile_cache.key import Key, key_of
from penstock_compile_cache.store import Listed, Restored, Saved, list_bundles, restore, save

__all__ = ["Key", "Listed", "Restored", "Saved", "key_of", "list_bundles", "restore", "save"]
