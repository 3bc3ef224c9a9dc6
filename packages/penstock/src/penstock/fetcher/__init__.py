"""Fetch: read a model from peers, and from storage once for all of them."""
