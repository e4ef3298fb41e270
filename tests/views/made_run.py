"""A run's folder of 60 steps, written by the trackers that real runs use; what its model wrote is hostile."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from rlsdk.interfaces import TrackerContext
from rlsdk.trainer.tracking.trackers import JsonlTracker

HOSTILE = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
    '<a href="javascript:window.ran=3">x</a><style>body{display:none}</style></div></body><svg onload=window.ran=4>'
)


def write_run(folder: Path, *, steps: int = 60, seed: int = 0, lr: float = 1e-6) -> Path:
    """Writes `metrics.jsonl`, `samples.jsonl`, `config.yaml` and `config.history.jsonl`."""
    draw = random.Random(seed)
    tracker = JsonlTracker(TrackerContext(run_dir=str(folder), run_name=folder.name, config={}))
    for step in range(1, steps + 1):
        tracker.log(step, _metrics(step, steps, draw))
        if step == 1 or step % 20 == 0:
            share = 0.3 + 0.4 * step / steps
            tracker.log(step, {"eval/accuracy_greedy": share, "eval/accuracy_greedy_se": 0.015, "time/eval_s": 4.0})
        tracker.log_samples(step, _samples(step, draw))
    tracker.close()
    (folder / "config.yaml").write_text(
        f"model: {{path: Qwen/Qwen2.5-0.5B-Instruct}}\ndata: {{train: 'openai/gsm8k:main'}}\n"
        f"algorithm: {{recipe: grpo}}\ntrain: {{optim: {{lr: {lr}}}}}\ntrainer: {{steps: {steps}}}\n"
    )
    moments = [[[at, kind, step, 1] for at, kind in ((9.0 * step, "start"), (9.0 * step + 5, "made"),
                (9.0 * step + 5, "train"), (9.0 * step + 8, "trained"))] for step in range(1, steps + 1)]  # fmt: skip
    (folder / "timeline.jsonl").write_text(
        "".join(json.dumps({"step": step, "moments": each}) + "\n" for step, each in enumerate(moments, 1))
    )
    start = {"time": "2026-01-02T03:04:05+0000", "step": 0, "checkpoint": None, "changed": {}, "surroundings": {
        "command": "rlsdk train --config run.yaml", "machine": "Linux x86_64, 2 CPU cores, 24 GiB memory, no GPU",
        "versions": "Python 3.11.7, rlsdk 0.1.0, torch 2.11.0"}}  # fmt: skip
    (folder / "config.history.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def _metrics(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    learned = 1 - math.exp(-3 * step / steps)
    noise = lambda scale: draw.gauss(0, scale)  # noqa: E731
    return {
        "reward/mean": 0.2 + 0.6 * learned + noise(0.05), "reward/accuracy": 0.15 + 0.5 * learned + noise(0.05),
        "reward/std": 0.45, "reward/gsm8k": 0.15 + 0.5 * learned + noise(0.05), "reward/format": 0.4 + 0.5 * learned,
        "reward/invalid_share": 0.0, "reward/groups_with_signal": 0.7 - 0.2 * learned,
        "response/tokens_mean": 180 + 120 * learned + noise(8), "response/tokens_max": 512,
        "response/truncated_share": 0.1 - 0.08 * learned, "policy/entropy": 0.6 - 0.4 * learned,
        "policy/approx_kl": abs(noise(0.002)), "policy/grad_norm": 1.2 + noise(0.2),
        "parity/log_prob_diff_mean": 2e-3 + abs(noise(2e-4)), "throughput/tokens_per_s": 12000 + noise(500),
        "time/rollout_s": 8 + noise(0.5), "time/reward_s": 1.0, "time/update_s": 5 + noise(0.3), "time/sync_s": 0.4,
        "time/other_s": 0.1, "time/step_s": 14.5,
    }  # fmt: skip


def _samples(step: int, draw: random.Random) -> list[dict[str, Any]]:
    found = []
    for index in range(2):
        prompt = f"Natalia sold clips to {48 + (step % 3 + index) % 5} of her friends. How many in all? {HOSTILE}"
        for sample in (0, 5):
            score = float(draw.random() < step / 60) if sample else 1.0
            tokens = ["She", " sold", " ", "48", " +", " 24", " =", " ", "72", ".\n", "<call>", "#### ", "72", HOSTILE]
            episode = _episode() if index else {}
            chances = [-round(abs(draw.gauss(0, 0.8)), 4) for _ in tokens]
            found.append({
                **episode, "group": f"train/0/{index}", "sample": sample, "prompt": prompt, "response": "".join(tokens),
                "answer": "72", "score": score, "reward/gsm8k": score, "reward/format": 1.0,
                "advantage": score - 0.5, "group_scores": [1.0, 0.0, 0.0, None, 1.0, score, 0.0, 0.0], "tokens": tokens,
                "log_probs": [None if at == tokens.index("<call>") else value for at, value in enumerate(chances)],
                "train_log_probs": [round(value + draw.gauss(0, 0.15), 4) for value in chances],
            })  # fmt: skip
    return found


def _episode() -> dict[str, Any]:
    """Two rows of a conversation, in which strangers have their say."""
    first = [
        {"text": "Natalia sold clips", "tokens": 3, "sampled": False},
        {"text": "She sold 48", "tokens": 4, "sampled": True, "versions": [3, 4]},
        {"text": f"[48] {HOSTILE}", "tokens": 2, "sampled": False},
        {"text": HOSTILE, "tokens": 9, "sampled": True, "versions": [4]},
    ]
    again = [first[0], {"text": "She sold 48", "tokens": 4, "sampled": False, "trained_in": 1}]
    last = [*again, {"text": "#### 72", "tokens": 2, "sampled": True, "versions": [4]}]
    use = {"turn": 0, "name": HOSTILE, "arguments": {"number": HOSTILE}, "result": HOSTILE, "failed": True}
    rows = [
        {"chain": 0, "scale": 1.0, "trained": 13, "spans": first},
        {"chain": 1, "scale": 0.5, "trained": 2, "spans": last},
    ]
    return {"episode": {"ended": "agent", "rows": rows, "tools": [use], "not_trained": {"abandoned": 4}}}
