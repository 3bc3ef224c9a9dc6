"""Casts and block formats of tensors' values, with the same bits on the CPU and on a device.

In / Out: a `Format` for `register_format`. Not here: when values are changed (`jobs.operations`, `sync.publish`).

`formats` has block formats (FP8, MXFP8, NVFP4) and the boxes of their blocks, `fuse` the same bits by grouped
kernels, `stored` formats that others wrote, `ggml` the types of GGUF.
"""

from penstock.transform.formats import Format, register_format

__all__ = ["Format", "register_format"]
