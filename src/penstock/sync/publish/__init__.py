"""The publishing side of sync: what a trainer shows."""
