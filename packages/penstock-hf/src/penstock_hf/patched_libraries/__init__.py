"""`patched_libraries()`: a context in which Hugging Face libraries read weights through Penstock.

transformers, diffusers, accelerate, PEFT and sentence-transformers locate files with huggingface_hub and read them with
safetensors. The context patches huggingface_hub and safetensors. Weight files that are missing from the cache are
streamed instead of downloaded.
"""

from penstock.spi import require_package

require_package("torch")

from penstock_hf.patched_libraries.context import PatchedLibrariesReport, directory, patched_libraries  # noqa: E402 - after what it needs

__all__ = ["PatchedLibrariesReport", "directory", "patched_libraries"]
