"""Store the compiled code of inference engines in signed bundles next to their models.

`restore` fills the compilers' caches from the bundle for a model, a program and its configuration. `save` writes a
bundle.
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
"""The module that defines each name. It is imported on first use, so `penstock --help` does not import an object-store
client."""

__all__ = [*TABLE]
__getattr__ = lazily(__name__, TABLE)


def __dir__() -> list[str]:
    return sorted(__all__)
