"""Time and memory of a step with a teacher against GRPO with a reference: `python -m benchmarks.teacher_cost`.

A Llama of random weights with a vocabulary of 32,000 learns from groups of samples, beside a second model of its own
size: the reference of a KL penalty, or a teacher. CPU seconds of one thread, best of the rounds: of the second model's
pass, and of the policy's forward and backward pass. Memory: the highest resident size of a process of its own, above
that of one with both models and no step. "travels": bytes of a token from the second model to the policy.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import Batch, ModelSpec
from rlsdk.kit.model.divergence import load_teacher_head
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import OutputModel, TeacherHead
from rlsdk.testing.process.models import write_tiny_model

SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 32_000,
}  # fmt: skip
GROUPS, SAMPLES, PROMPT, RESPONSE, TOP_K = 2, 4, 48, 64, 32
PASSES: dict[str, Sequence[str]] = {
    "no second model": (),
    "GRPO, reference": ("log_probs",),
    "sampled": ("log_probs",),
    "exact": ("hidden_states",),
    f"top_k {TOP_K}": ("top_ids", "top_log_probs", "log_probs"),
}
"""What is learned -> outputs of the second model."""
BYTES = {"log_probs": 4, "hidden_states": 4 * SHAPE["hidden_size"], "top_ids": 8 * TOP_K, "top_log_probs": 4 * TOP_K}
"""Of a token."""


def make_batch() -> Batch:
    """Groups of samples that share a prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(GROUPS):
        prompt = torch.randint(5, 30_000, (PROMPT,), generator=generator).tolist()
        for _ in range(SAMPLES):
            rows.append(prompt + torch.randint(5, 30_000, (RESPONSE,), generator=generator).tolist())
    batch = Batch.from_rows(rows)
    mask = batch.position_ids >= PROMPT
    return batch.with_tokens(
        response_mask=mask,
        loss_weight=mask / mask.sum(),
        advantages=mask * torch.randn(batch.num_tokens, generator=generator),
    ).with_meta(temperature=1.0, top_k=TOP_K)


def taught(batch: Batch, name: str, found: dict[str, torch.Tensor]) -> Batch:
    """The batch with what the second model gave."""
    if name == "GRPO, reference":
        return batch.with_tokens(ref_log_probs=found["log_probs"])
    if name == "sampled":
        return batch.with_tokens(advantages=batch["advantages"] + found["log_probs"])
    batch = batch.with_tokens(teacher_weight=batch["response_mask"].float())
    if name == "exact":
        batch = batch.with_tokens(teacher_states=found["hidden_states"])
    else:
        batch = batch.with_tokens(teacher_top_ids=found["top_ids"], teacher_top_log_probs=found["top_log_probs"])
    return batch.with_meta(teacher_temperature=1.0, divergence_beta=1.0)


def measure(name: str, folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of the two passes, and the bytes of memory that they take."""
    torch.set_num_threads(1)
    specs = [ModelSpec(path=str(folder / one), dtype="float32") for one in ("policy", "other")]
    policy, other = (OutputModel(build_model(spec)) for spec in specs)
    if name == "exact":
        policy.teachers[0] = TeacherHead(load_teacher_head(specs[1], torch.device("cpu")))
    objective = PolicyObjective(
        kl_coef=0.1 if name == "GRPO, reference" else 0.0,
        divergence_coef=1.0 if name in ("exact", f"top_k {TOP_K}") else 0.0,
        on_policy=True,
    )
    batch, times = make_batch(), {"pass": float("inf"), "update": float("inf")}
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    before = _resident_peak()

    def timed(part: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        times[part] = min(times[part], time.process_time() - start)
        return result

    def look() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found: dict[str, torch.Tensor] = other(batch, PASSES[name])
            return found

    def learn(given: Batch) -> None:
        objective(policy(given, objective.outputs), given).loss.backward()  # type: ignore[no-untyped-call]

    for _ in range(rounds):
        given = taught(batch, name, timed("pass", look)) if PASSES[name] else batch
        timed("update", functools.partial(learn, given))
    pass_s = times["pass"] if PASSES[name] else 0.0
    return {"pass_s": pass_s, "update_s": times["update"], "bytes": _resident_peak() - before}


def _resident_peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], Path(args.one[1]), args.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for at, name in enumerate(("policy", "other")):
            write_tiny_model(Path(folder) / name, seed=at, **SHAPE)
        found = {}
        for name in PASSES:
            words = [
                sys.executable,
                "-m",
                "benchmarks.teacher_cost",
                "--rounds",
                str(args.rounds),
                "--one",
                name,
                folder,
            ]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    table = Table()
    for title in ("learns from", "second model, s", "update, s", "of GRPO with a reference", "MiB", "travels, bytes"):
        table.add_column(title, justify="left" if title == "learns from" else "right")
    whole = sum(found["GRPO, reference"][part] for part in ("pass_s", "update_s"))
    for name, one in found.items():
        size = sum(BYTES[output] for output in PASSES[name])
        table.add_row(
            name, f"{one['pass_s']:.2f}", f"{one['update_s']:.2f}", f"{(one['pass_s'] + one['update_s']) / whole:.2f}",
            f"{one['bytes'] / (1 << 20):.0f}", str(size),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
