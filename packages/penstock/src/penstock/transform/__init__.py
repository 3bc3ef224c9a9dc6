"""Casts and block formats of tensors, with the same bits on the CPU and on a device."""

from penstock.transform.formats import Format, register_format

__all__ = ["Format", "register_format"]
