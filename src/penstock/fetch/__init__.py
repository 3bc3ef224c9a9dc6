"""Fetch: a model arrives from peers, and from storage once for all of them."""
