"""One process of a fleet: its weights, the server other members ask, and the client that asks them."""
