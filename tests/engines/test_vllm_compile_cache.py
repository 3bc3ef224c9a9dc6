"""With one option of the loader, vLLM reuses compiled code in a fresh home, and generates the same tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.tiny import MODELS
from tests.unit.compile_cache.test_bundle import keys

import penstock_compile_cache

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=128, seed=0,
        load_format="penstock", model_loader_extra_config={"compile_cache": True},
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 200]}], greedy)
    print("TOKENS", json.dumps(list(answer.outputs[0].token_ids)))
"""


def test_compiled_code_is_reused_in_second_home_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(MODELS["llama"]()).save_pretrained(model)
    private, public = keys()
    (tmp_path / "private.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    (tmp_path / "engine.py").write_text(ENGINE)
    found, files = [], []
    for name in ("first", "second"):
        home = tmp_path / name
        home.mkdir()
        environ = {
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            # TRL, which another test imports, sets ERROR in this process.
            "VLLM_LOGGING_LEVEL": "INFO",
            "PENSTOCK_COMPILE_CACHE_KEYS": str(tmp_path / "public.pem"),
            "PENSTOCK_COMPILE_CACHE_SIGNING_KEY": str(tmp_path / "private.pem"),
        }
        command = [sys.executable, str(tmp_path / "engine.py"), str(model)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.rpartition("TOKENS ")[2].splitlines()[0]))
        said = done.stdout + done.stderr
        assert ("none, the engine compiles" in said) == (name == "first")
        assert (" written in " in said) == (name == "first")
        # vLLM traces the model only in the first home.
        assert ("saved AOT compiled function" in said) == (name == "first")
        assert ("Directly load AOT compilation" in said) == (name == "second")
        (root,) = [path for path in (home / "cache" / "penstock" / "compile-cache").iterdir() if path.is_dir()]
        files.append({path.relative_to(root) for path in root.rglob("*.so")})
    assert found[0] == found[1]
    # Everything that Inductor built in the first home is in the second one, and nothing was built there.
    assert files[0] and files[1] == files[0]
    (bundle,) = penstock_compile_cache.list_bundles(model, public_keys=[tmp_path / "public.pem"])
    assert bundle.key is not None and bundle.key.engine == "vllm" and bundle.key.engine_version
