"""The identity of weights in one rank's memory, which decides if members can exchange them, and its digest, the key.

In: a worker's description of its weights. Out: a key; the fields in which two identities differ.
Not here: the members that hold weights (`directory`), the bytes' own digests (`digest`).
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from penstock.types import DType, TensorTable


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two holdings exchange chunks only if all of these are equal; a field left empty is equal only to an empty one.

    Unknown fields are refused, unlike in messages: ignoring one would call weights equal that differ in it. A new field
    is a new major version of the protocol.
    """

    model: str
    revision: str = ""
    """`w1-...`; or `h1-...` and the files' identities, since headers alone do not say that bodies are equal."""
    layout: str = ""
    """Digest of names, dtypes and shapes: `layout_digest`."""
    dtype: str = ""
    quantization: str = ""
    """Digest of the whole quantisation config."""
    parallel: dict[str, str] = {}
    """Coordinates, e.g. `{"tp": "1/4", "pp": "0/1"}`."""
    role: str = "target"
    """`target`, `draft`, `lora:NAME`, ..."""
    post_processing: str = ""
    """The engine's changes to the weights after loading; empty: none."""
    engine: str = ""
    """Name and version of engine and kernels, where `post_processing` depends on them."""
    device_capability: str = ""

    def key(self) -> str:
        """Return the digest of all fields: 32 hex digits."""
        # Deterministic order: the key must not depend on the order in which a caller filled `parallel`.
        ordered = msgspec.json.encode(self, order="deterministic")
        return str(blake3(ordered).hexdigest(length=16))

    def differences(self, other: Identity) -> dict[str, tuple[str, str]]:
        """Return the differing fields: name -> (this one's, the other's)."""
        pairs = ((name, str(getattr(self, name)), str(getattr(other, name))) for name in self.__struct_fields__)
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}


def layout_digest(table: TensorTable) -> str:
    """Return the digest of names, dtypes and shapes, sorted by name, whatever the files are: 32 hex digits."""
    rows = sorted(zip(table.names, map(DType.__str__, table.dtypes), table.shapes, strict=True))
    return str(blake3(msgspec.json.encode(rows)).hexdigest(length=16))
