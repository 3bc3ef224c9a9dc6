"""Casts and block formats of tensors' values, with the same bits on the CPU and on a device.

In / Out: a `Format` for `register_format`. Not here: when values are changed (`jobs.operations`, `sync.publish`).
"""

from penstock.transform.formats import Format, register_format

__all__ = ["Format", "register_format"]
