"""Keeper: models that stay in memory, and processes that attach to them."""
