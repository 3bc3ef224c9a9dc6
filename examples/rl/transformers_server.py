"""Serve a small transformers Llama through the vLLM routes that an RL loop calls, on machines without vLLM.

    python examples/rl/transformers_server.py examples/rl/tiny_llama --port 8000

The bodies and answers are vLLM's. The server answers one request at a time and caches nothing, because it is only for
the examples.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps


class Engine:
    """A model, and the sync that sends its weights."""

    def __init__(self, directory: Path) -> None:
        # The server starts with other weights than the trainer's, so it must have received the trainer's.
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).eval()
        self.subscriber: Any = None
        self.weight_version = "default"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample a completion for each prompt, or for a single prompt. All prompts have the same length."""
        prompts = torch.tensor(body["prompt"])
        if prompts.dim() == 1:
            prompts = prompts[None]
        tokens, logprobs = prompts, []
        with torch.no_grad():
            for _ in range(body["max_tokens"]):
                scores = self.model(input_ids=tokens).logits[:, -1].log_softmax(-1)
                new = torch.multinomial(scores.exp(), 1)
                tokens = torch.cat([tokens, new], 1)
                logprobs.append(scores.gather(1, new))
        completions = tokens[:, prompts.shape[1] :].tolist()
        scores_of = torch.cat(logprobs, 1).tolist()
        choices = []
        for index, (ids, scores) in enumerate(zip(completions, scores_of, strict=True)):
            end = len(ids)
            if not body.get("ignore_eos") and self.model.config.eos_token_id in ids:
                end = ids.index(self.model.config.eos_token_id) + 1
            choices.append({"index": index, "token_ids": ids[:end], "logprobs": {"token_logprobs": scores[:end]}})
        return {"choices": choices}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Answer a request."""
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                connection = ps.ConnectionSettings(stall_s=info["stall_s"])
                self.subscriber = ps.subscriber(info["name"], self.model, connection=connection, rank=(0, 1))
            case "/update_weights":
                self.subscriber.stage(body["update_info"]["version"])
            case "/finish_weight_update":
                self.subscriber.commit()
                self.weight_version = body["weight_version"]
            case "/collective_rpc":
                files = Path(body["kwargs"]["weights_path"]).glob("*.safetensors")
                self.model.load_state_dict({name: tensor for file in files for name, tensor in load_file(file).items()})
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            # There is nothing to pause, because one request is answered at a time.
            case "/pause" | "/resume" | "/start_weight_update":
                pass
            case _:
                raise ValueError(f"there is no route {path}")
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    # The trainer's ranks need the other cores.
    torch.set_num_threads(1)
    engine = Engine(args.model)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"weight_version": engine.weight_version})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            try:
                self.answer(200, engine.post(urlsplit(self.path).path, body))
            except (ps.PenstockError, ValueError, KeyError) as error:
                self.answer(500, {"error": f"{type(error).__name__}: {error}"})

        def answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(HTTPServer):
        # A trainer sends all requests of a step at the same time.
        request_queue_size = 256

    Server(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
