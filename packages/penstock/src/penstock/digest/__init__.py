"""Digests, by which bytes are verified. `leaf` is the reference on the CPU, `cuda` has the same bits on a device.

In: tensor bytes. Out: XXH3-64 of every leaf, and the BLAKE3 root over them that names a weight set.
Not here: where digests are kept (`storage.weight_set`), when they are checked (`engine`).
"""
