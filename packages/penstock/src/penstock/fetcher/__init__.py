"""The fetch journey: read a model from peers, and read from storage only chunks that no peer has.

`join` is the API, and `run` connects the other modules.
"""
