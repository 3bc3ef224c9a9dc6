"""Penstock for libraries of Hugging Face: from_pretrained, adapters, and drop-ins for safetensors and Run:ai's loader.

The package imports no module, because each module needs the package that it adapts.
"""
