"""The fetch journey: read a model from peers, and read from storage only what no peer has.

`join` is the API, and `run` connects the other modules.
"""
