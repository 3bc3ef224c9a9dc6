"""Digests that verify bytes: XXH3-64 of every leaf, and the BLAKE3 root over them that names a weight set."""
