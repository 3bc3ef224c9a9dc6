"""Penstock for libraries of Hugging Face: from_pretrained, adapters, and drop-ins for safetensors and Run:ai's loader.

No module is imported here: each needs the package that it adapts.
"""
