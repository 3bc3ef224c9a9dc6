"""What a process holds for others: memory regions, their registrations with transports, and the digests of their bytes.

- `regions` registers memory with transports, and fences and closes the registrations.
- `holding` adds a generation, a fence, and the readers that wait for bytes.
- `digester` computes digests of strips in a region, on the region's device.
- `weight_layout` is the layout of a fetch: tensors sorted by name and divided into chunks, and its messages.
- `placement` finds the places of rows and chunks, in this process and at a peer, and digests chunks.
- `verified` keeps the verified chunks, their digests, the log of their arrival, and the order of spot checks.

`peer.local_weights` serves the weights of one key, and `sync.local_version` the versions of one rank. Both build on
this room.
"""
