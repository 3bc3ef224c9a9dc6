"""The directory service of a fleet: its state, its server, its client."""
