"""Use tensors as they arrive, without holding all of them: python examples/stream.py [URI]

It finds the largest magnitude for each dtype. Without a URI, it writes a small synthetic checkpoint first.
"""

from __future__ import annotations

import sys
import tempfile

import penstock as ps
from penstock.testing.checkpoints import write_llama


def main(uri: str) -> None:
    largest: dict[str, float] = {}
    with ps.stream(uri) as tensors:
        for _, tensor in tensors:
            if tensor.numel() and tensor.is_floating_point():
                dtype = str(tensor.dtype)
                largest[dtype] = max(largest.get(dtype, 0.0), tensor.float().abs().max().item())
    for dtype, value in largest.items():
        print(f"{dtype:<24} {value:.4g}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            write_llama(directory, total_bytes=16 << 20)
            main(directory)
