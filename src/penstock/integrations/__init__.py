"""Integrations: inference engines and trainers that load, fetch and sync their weights through Penstock.

No integration is imported here: each module needs the package that it integrates. All of them need torch.
"""

from penstock.entry_points import require_package

require_package("torch")
