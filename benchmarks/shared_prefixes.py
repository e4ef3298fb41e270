"""Forward and backward of groups that share a prompt: `python -m benchmarks.shared_prefixes [--json PATH]`.

A Llama of random weights on the CPU, one thread, in three forms: rows padded to a rectangle; packed, every row whole;
packed, each prefix once (`rlsdk.kit.model.prefixes`). CPU milliseconds, best of the rounds, which take turns. "at best"
is the share of the tokens that are distinct: what the time would fall to if linear layers were all there is.
"difference" is that of the whole gradient from the rectangle's, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rlsdk.interfaces import Batch, Head, ModelSpec
from rlsdk.kit.model import outputs, pass_plan
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.prefixes import Prefixes, distinct_prefixes
from rlsdk.testing.process.models import write_tiny_model

GROUPS, SAMPLES, RESPONSE = 2, 8, 96
PROMPTS = (16, 96, 384)
FORMS = ("rectangle", "packed", "prefixes once")


def make_batch(prompt: int) -> Batch:
    """Two groups; responses of 48 to 96 tokens."""
    generator = torch.Generator().manual_seed(prompt)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 120, (count,), generator=generator).tolist()

    rows, masks = [], []
    for _ in range(GROUPS):
        shared = ids(prompt)
        for sample in range(SAMPLES):
            response = ids(RESPONSE // 2 + sample * RESPONSE // (2 * (SAMPLES - 1)))
            rows.append(shared + response)
            masks += [False] * prompt + [True] * len(response)
    return Batch.from_rows(rows).with_tokens(response_mask=torch.tensor(masks))


def whole_rows(batch: Batch) -> Prefixes:
    """As if no two rows had anything in common."""
    every = torch.arange(batch.num_tokens)
    return Prefixes(every, every)


def run(model: nn.Module, batch: Batch, form: str) -> tuple[float, Tensor]:
    """(CPU ms, the gradient, flat)."""
    model.zero_grad()
    find = distinct_prefixes if form == "prefixes once" else whole_rows
    with mock.patch.object(pass_plan, "distinct_prefixes", find):
        before = time.process_time()
        found = outputs.compute_outputs(model, Head.LM, batch, ("log_probs",), packed=form != "rectangle")
        found["log_probs"].sum().backward()  # type: ignore[no-untyped-call]
        spent = time.process_time() - before
    return spent * 1e3, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        model = build_model(ModelSpec(path=str(write_tiny_model(Path(folder) / "model", **shape))))
    table = []
    for prompt in PROMPTS:
        batch = make_batch(prompt)
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        gradients: dict[str, Tensor] = {}
        for _ in range(arguments.rounds):
            for form in FORMS:
                spent, gradients[form] = run(model, batch, form)
                times[form].append(spent)
        best = {form: min(values) for form, values in times.items()}
        plain = gradients["rectangle"]
        row = {
            "prompt": prompt,
            **{form: round(value, 1) for form, value in best.items()},
            "of packed": round(best["prefixes once"] / best["packed"], 2),
            "at best": round(distinct_prefixes(batch).count / batch.num_tokens, 2),
            "difference": float(f"{float((gradients['prefixes once'] - plain).norm() / plain.norm()):.1e}"),
        }
        table.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
