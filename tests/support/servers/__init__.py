"""Servers and volumes that tests and benchmarks start: object stores, model hubs, a slow network volume."""
