"""GGUF files written by the format's own package, and their contents as its reader returns them.

`tests.hostile.test_gguf_attacks` has malformed files.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

ROWS, WIDTH = 8, 256


def arrays(seed: int = 0) -> dict[str, tuple[npt.NDArray[np.generic], Type | None]]:
    """Return tensors of plain and quantised types, as the writer takes them."""
    dice = np.random.default_rng(seed)
    values = dice.standard_normal((ROWS, WIDTH)).astype(np.float32)
    # Use random codes with valid scales, because the package reads K-quants but does not write them.
    q4_k = dice.integers(0, 256, (ROWS, 144), np.uint8)
    q4_k[:, :4] = np.full((ROWS, 2), 0.01, np.float16).view(np.uint8)
    q6_k = dice.integers(0, 256, (2, ROWS, 210), np.uint8)
    q6_k[..., 208:] = np.full((2, ROWS, 1), 0.02, np.float16).view(np.uint8)
    tensors: dict[str, tuple[npt.NDArray[np.generic], Type | None]] = {
        "token_embd.weight": (quants.quantize(values, Type.Q8_0), Type.Q8_0),
        "blk.0.attn_q.weight": (quants.quantize(values * 2, Type.Q4_0), Type.Q4_0),
        "blk.0.attn_k.weight": (quants.quantize(values * 3, Type.BF16), Type.BF16),
        "blk.0.attn_v.weight": (values.astype(np.float16), None),
        "blk.0.ffn_up.weight": (q4_k, Type.Q4_K),
        "blk.0.ffn_gate_exps.weight": (q6_k, Type.Q6_K),
        # Its 12 bytes are padded to 32.
        "blk.0.attn_norm.weight": (values[0, :3].copy(), None),
        "output_norm.weight": (values[0].copy(), None),
        "positions": (np.arange(7, dtype=np.int32), None),
    }
    return tensors


def write(path: Path, *, seed: int = 0, tokens: int = 300, parts: int = 0, alignment: int = 0) -> list[Path]:
    """Write a small model, split into files of `parts` tensors if given. Return the files."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=parts)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_rope_freq_base(10000.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(tokens)])
    writer.add_token_scores([0.5 * i for i in range(tokens)])
    writer.add_array("tiny.short", [1, 2, 3])
    writer.add_add_bos_token(True)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, (array, kind) in arrays(seed).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*.gguf")) if parts else [path]


def expected_tensors(*files: Path) -> dict[str, torch.Tensor]:
    """Return the tensors as the package's reader returns them. BF16 keeps its dtype, which numpy lacks."""
    tensors = {}
    for file in files:
        for entry in gguf.GGUFReader(file).tensors:
            tensor = torch.from_numpy(entry.data.copy())
            tensors[entry.name] = tensor.view(torch.bfloat16) if entry.tensor_type is Type.BF16 else tensor
    return tensors
