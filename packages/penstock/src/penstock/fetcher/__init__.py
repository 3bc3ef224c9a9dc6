"""The fetch journey: read a model from peers, and read from storage only what no peer has.

`join` is the API. `discover` finds the tensors and their destination. `run` connects `hub_poller`, `claim_loop` and
`assignment`. `choice` decides which chunks are read from which `upstream`, and `retries` decides when a failed member
is tried again. `storage_reader` reads storage and `verify` compares digests. `to_files` and `storage_initializer`
implement commands.
"""
