"""HTTP/1.1 for data: range requests into buffers, serving of memory, retries by progress.

* Both ends: `head` parses strictly, `connection` moves bytes, and `client` has requests and replies.
* Reads of objects: `pool`, `range_request`, and `network` for proxies and certificates.
* Requests to hubs and members: `control`.
* A member's server: `server`, `region_server`, `region_messages`, `compression`, and `phases` for probes.
"""
