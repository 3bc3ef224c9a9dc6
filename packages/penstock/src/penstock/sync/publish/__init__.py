"""The publishing side of sync: a trainer's ranks serve their weights."""
