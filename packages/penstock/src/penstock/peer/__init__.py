"""One process in a fleet: its weights, the server for other members, and the client for their servers."""
