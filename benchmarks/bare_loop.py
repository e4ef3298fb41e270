"""The quickstart's GRPO in plain torch and transformers, no framework: what `compare_trl` measures others against.

`python -m benchmarks.bare_loop MODEL WORDS --steps 30`. Prompts run once for all their samples, decoding is cached, one
update a step under the weights that sampled. Every prompt has the same length, so nothing is padded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.marks import mark

PROMPTS, SAMPLES, MAX_NEW = 64, 8, 6
LR = 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("words", type=Path, help="one a line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train(model, tokenizer, args.words.read_text(encoding="utf-8").split(), args.steps)


def train(model: Any, tokenizer: Any, words: list[str], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    for step in range(steps):
        batch = words[step * PROMPTS : (step + 1) * PROMPTS]
        start = time.perf_counter()
        prompts = tokenizer([f"{word}>" for word in batch], return_tensors="pt")["input_ids"]
        completions, mask = generate(model, prompts, tokenizer.eos_token_id)
        generated = time.perf_counter()
        texts = [tokenizer.decode(row[keep.bool()][:-1]) for row, keep in zip(completions, mask, strict=True)]
        scores = torch.tensor([score(text, batch[at // SAMPLES]) for at, text in enumerate(texts)])
        update(model, optimizer, prompts.repeat_interleave(SAMPLES, 0), completions, mask, advantages(scores))
        parts = {"generate_s": generated - start, "update_s": time.perf_counter() - generated}
        mark(step + 1, parts)


@torch.no_grad()
def generate(model: Any, prompts: Tensor, eos: int) -> tuple[Tensor, Tensor]:
    """Completions `[rows, MAX_NEW]`, samples of a prompt side by side, and 1.0 up to each one's end."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    hidden = model.model(prompts, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
    cache.batch_repeat_interleave(SAMPLES)
    hidden = hidden.repeat_interleave(SAMPLES, 0)
    completions = torch.full((len(hidden), MAX_NEW), eos)
    done = torch.zeros(len(hidden), dtype=torch.bool)
    mask = torch.zeros(len(hidden), MAX_NEW)
    for at in range(MAX_NEW):
        token = torch.multinomial(model.lm_head(hidden).softmax(-1), 1)[:, 0]
        mask[:, at] = (~done).float()
        completions[:, at] = token.masked_fill(done, eos)
        done |= token == eos
        if at + 1 == MAX_NEW or bool(done.all()):
            break
        hidden = model.model(token[:, None], past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
    return completions, mask


def score(text: str, word: str) -> float:
    """1 for the word spelt backward; else half the share of letters in the right place."""
    answer = word[::-1]
    if text == answer:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(answer), len(text))


def advantages(scores: Tensor) -> Tensor:
    groups = scores.view(-1, SAMPLES)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)


def update(
    model: Any, optimizer: torch.optim.Optimizer, prompts: Tensor, completions: Tensor, mask: Tensor, advantage: Tensor
) -> None:
    """One clipped-surrogate step; on policy the old log-probs are the new ones."""
    hidden = model.model(torch.cat([prompts, completions[:, :-1]], 1), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, prompts.shape[1] - 1 :])
    log_probs = F.log_softmax(logits, -1).gather(2, completions[..., None])[..., 0]
    ratio = (log_probs - log_probs.detach()).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -(surrogate * mask).sum() / mask.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
