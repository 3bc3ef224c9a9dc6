# Written by scripts/stubs.py.
from penstock_compile_cache.key import Key as Key
from penstock_compile_cache.key import key_of as key_of
from penstock_compile_cache.store import Listed as Listed
from penstock_compile_cache.store import Restored as Restored
from penstock_compile_cache.store import Saved as Saved
from penstock_compile_cache.store import list_bundles as list_bundles
from penstock_compile_cache.store import restore as restore
from penstock_compile_cache.store import save as save
TABLE: dict[str, str]
__all__: list[str] = [
    "Key",
    "Listed",
    "Restored",
    "Saved",
    "key_of",
    "list_bundles",
    "restore",
    "save",
]
