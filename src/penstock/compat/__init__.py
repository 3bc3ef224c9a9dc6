"""Compat: the names of other loaders over Penstock, so that adopting it is one import."""
