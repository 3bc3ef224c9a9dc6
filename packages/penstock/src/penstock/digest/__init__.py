"""Digests that verify bytes: XXH3-64 of every leaf, and the BLAKE3 root over them that names a weight set.

`leaf` and `strip` are the references on the CPU. `cuda` gives the same digests on a device.
"""
