"""Penstock for Hugging Face libraries: from_pretrained, adapters, and drop-ins for safetensors and Run:ai's loader.

The package imports none of its modules, because each module requires the library that it adapts.
"""
