"""The hub of a fleet: the directory of its members and models, its server and its page.

- `directory` answers the requests of members, on a `store` in memory or in Redis. `snapshot` is what it knows.
- `relay` and `relay_parents` choose from whom each receiver reads, and `claims` which member reads what from storage.
- `app` serves the directory over HTTP by the `routes` on a `server`, and `page` serves the fleet's page.
- `limits`, `failures`, `complaints` and `audit` bound and record what callers do.

`penstock.hub` has the messages and the client that members use.
"""
