"""Casts and block formats of tensors, with the same bits on the CPU and on a device.

`formats` describes the block formats (FP8, MXFP8, NVFP4), `quantize` computes them in torch, and `fuse` gives the same
bits by kernels over many tensors. `select` chooses the tensors to quantise.
"""

from penstock.transform.formats import Format, register_format

__all__ = ["Format", "register_format"]
