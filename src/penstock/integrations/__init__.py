"""Integrations: inference engines and trainers that load, fetch and sync their weights through Penstock.

Nothing is imported here: each module needs the package that it integrates.
"""
