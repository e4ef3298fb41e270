"""A small OpenAI-compatible server on plain transformers, to try the plugin with: `python small_server.py FOLDER`.

Serves `/v1/models` and `/v1/completions` for prompts of token ids, with `return_token_ids`. Prints its address.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Server(ThreadingHTTPServer):
    """Holds the model; `plain` leaves token ids out, as servers without the extension do."""

    daemon_threads = True

    def __init__(self, folder: str, *, port: int = 0, plain: bool = False) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain = plain
        self.asked: list[dict[str, Any]] = []
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Choices of one request. Log-probs are those before temperature, as most servers give them."""
        with self.lock:
            self.asked.append(body)
            torch.manual_seed(body.get("seed", 0))
            return {"choices": [self._choice(index, body) for index in range(body["n"])]}

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        ids, found, log_probs, reason = list(body["prompt"]), [], [], "length"
        for _ in range(body["max_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            token = self._pick(logits, body["temperature"])
            ids.append(token)
            found.append(token)
            log_probs.append(float(logits.log_softmax(-1)[token]))
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        choice = {"index": index, "text": "", "finish_reason": reason, "logprobs": {"token_logprobs": log_probs}}
        return choice if self.plain else {**choice, "token_ids": found}

    @staticmethod
    def _pick(logits: torch.Tensor, temperature: float) -> int:
        if temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial((logits / temperature).softmax(-1), 1))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.server.complete(body))

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
