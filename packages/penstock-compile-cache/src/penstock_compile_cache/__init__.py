"""Compiled code of inference engines, kept in signed bundles beside their models.

In: a model, a program and its configuration. Out: the code, restored into the caches of the compilers; bundles of it.
"""

from penstock.exports import lazily

TABLE = {
    "Key": "penstock_compile_cache.key",
    "Listed": "penstock_compile_cache.store",
    "Restored": "penstock_compile_cache.store",
    "Saved": "penstock_compile_cache.store",
    "key_of": "penstock_compile_cache.key",
    "list_bundles": "penstock_compile_cache.store",
    "restore": "penstock_compile_cache.store",
    "save": "penstock_compile_cache.store",
}
"""Name -> module that defines it. Imported when first used: `penstock --help` needs no client of object stores."""

__all__ = [*TABLE]
__getattr__ = lazily(__name__, TABLE)


def __dir__() -> list[str]:
    return sorted(__all__)
