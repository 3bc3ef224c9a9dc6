"""Constants of XXH3-64 (seed 0, default secret). Unlike the kernels, this module does not need Triton."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1024
"""Bytes between two scrambles: (192 - 64) / 8 = 16 stripes of 64 bytes. Source: XXH3 spec, "Step 2: process blocks"."""
SHORT_BYTES = 240
"""Longest input of the short algorithms in bytes. Source: XXH3 spec, "XXH3 algorithm overview"."""
INIT_AT = 192
"""Index in `constants` of the initial values of the accumulators."""
KEYS_AT = 200
"""Index in `constants` of the keys of the stripes."""
# The 192-byte default secret. Source: XXH3 spec, "defaultSecret".
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# Initial values of the eight accumulators. Source: XXH3 spec, "Step 1: initialize internal accumulators".
_PRIMES = (0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_ACCUMULATORS = (*_PRIMES, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1)


def constants() -> npt.NDArray[np.uint64]:
    """Return the table that every kernel reads: [328] uint64.

    Entry o, for o from 0 to 184, holds eight bytes of the secret from byte o. The accumulators' initial values begin
    at INIT_AT. The keys of the sixteen stripes of a block, eight each, begin at KEYS_AT.
    """
    # The algorithm also reads its secret at odd offsets.
    words = [int.from_bytes(_SECRET[offset : offset + 8], "little") for offset in range(len(_SECRET) - 7)]
    keys = [words[8 * (stripe + lane)] for stripe in range(16) for lane in range(8)]
    return np.array([*words, *[0] * 7, *_ACCUMULATORS, *keys], dtype=np.uint64)
