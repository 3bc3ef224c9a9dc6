"""Load a checkpoint into CPU memory and print a report: python examples/load_cpu.py [URI]

Without a URI, this writes a small synthetic checkpoint first.
"""

from __future__ import annotations

import sys
import tempfile

import penstock as ps
from penstock.testing.checkpoints import write_llama


def main(uri: str) -> None:
    weights = ps.load(uri, device="cpu")
    print(weights.report.summary())
    for file in weights.report.files:
        print(f"{file.uri}: {file.path} {file.why}")
    print(f"verified: {weights.report.verified} {weights.report.why}")
    name, tensor = next(iter(weights.items()))
    print(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            write_llama(directory, total_bytes=16 << 20)
            main(directory)
