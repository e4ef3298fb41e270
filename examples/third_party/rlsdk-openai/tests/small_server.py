"""A small OpenAI-compatible server on plain transformers, to try the plugin with: `python small_server.py FOLDER`.

Serves `/v1/models` and `/v1/completions` for prompts of token ids, with `return_token_ids`. Prints its address.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Semaphore
from typing import Any

import torch
from transformers import AutoModelForCausalLM

AT_ONCE = 4
"""Requests that are decoded side by side: a short one does not wait for a long one."""


class Server(ThreadingHTTPServer):
    """Holds the model; `plain` leaves token ids out, as servers without the extension do."""

    daemon_threads = True
    request_queue_size = 256
    """Connections that may wait: a step asks for all of its samples at once."""

    def __init__(self, folder: str, *, port: int = 0, plain: bool = False) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain = plain
        self.asked: list[dict[str, Any]] = []
        self.slots = Semaphore(AT_ONCE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Choices of one request. Log-probs are those before temperature, as most servers give them."""
        self.asked.append(body)
        source = torch.Generator()
        if "seed" in body:
            source.manual_seed(body["seed"])
        else:
            source.seed()
        ids = torch.tensor([body["prompt"]] * body["n"])
        told = torch.zeros(body["n"], 0)
        new, cache = ids, None
        for _ in range(body["max_tokens"]):
            found = self.model(new, past_key_values=cache, use_cache=True)
            logits, cache = found.logits[:, -1], found.past_key_values
            new = torch.multinomial(_probabilities(logits, body), 1, generator=source)
            ids = torch.cat([ids, new], dim=1)
            told = torch.cat([told, logits.log_softmax(-1).gather(1, new)], dim=1)
        made = ids[:, len(body["prompt"]) :].tolist()
        return {"choices": [self._choice(i, body, made[i], told[i].tolist()) for i in range(body["n"])]}

    def _choice(self, index: int, body: dict[str, Any], ids: list[int], log_probs: list[float]) -> dict[str, Any]:
        """Sample `index`, cut behind its first stop token."""
        ends = [at for at, token in enumerate(ids) if token in body["stop_token_ids"]]
        length = ends[0] + 1 if ends else len(ids)
        told = {"token_logprobs": log_probs[:length]}
        choice = {"index": index, "text": "", "finish_reason": "stop" if ends else "length", "logprobs": told}
        return choice if self.plain else {**choice, "token_ids": ids[:length]}


def _probabilities(logits: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
    """`[n, V]`: what tokens are drawn from: temperature, then top-k, then top-p."""
    if body["temperature"] == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    ordered, index = (logits / body["temperature"]).softmax(-1).sort(dim=-1, descending=True)
    ordered[:, body.get("top_k", logits.shape[-1]) :] = 0
    before = ordered.cumsum(-1) - ordered
    ordered[before >= body["top_p"] * ordered.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(ordered).scatter(-1, index, ordered)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.slots:
            choices = self.server.complete(body)
        self._answer(choices)

    def _answer(self, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


if __name__ == "__main__":
    server = Server(sys.argv[1])
    print(server.url, flush=True)
    server.serve_forever()
