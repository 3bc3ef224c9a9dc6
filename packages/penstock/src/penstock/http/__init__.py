"""HTTP/1.1 for data: range requests into buffers, serving of memory, retries by progress.

`head` is strict; `connection` serves both ends; `client` has requests and replies. Reads of objects: `pool`,
`range_request`, `network` (proxies, certificates). Questions to hubs and members: `control`. A member's side:
`server`, `region_server`, `region_messages`, `compression` by byte planes, `phases` for probes.
"""
