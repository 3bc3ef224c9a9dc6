"""Fetch: read a model from peers, and from storage once for all of them.

`join` is the API. `discover` finds tensors and destination. `run` wires `hub_poller`, `claim_loop` and `assignment`:
`choice` says which chunks are read from which `upstream`, and `retries` when a failed member is tried again.
`storage_reader` reads storage, `verify` compares digests. `to_files` and `storage_initializer` are commands.
"""
