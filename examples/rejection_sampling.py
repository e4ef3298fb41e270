"""Rejection sampling and iterative DPO: sample, keep, train, and again with what was trained.

On the quickstart's task, in minutes on two cores:

    python examples/rejection_sampling.py
"""

from __future__ import annotations

from typing import Any

import rlsdk

FORM: dict[str, Any] = {
    "data.prompt_template": "{metadata.word}>", "data.max_prompt_tokens": 8, "rollout.max_response_tokens": 6,
}  # fmt: skip
TASK = FORM | {
    "data.train": "quickstart:spell_backward", "data.options": {"size": 12000, "seed": 42}, "data.num_eval_rows": 512,
    "reward": {"name": "spell_backward", "options": {"partial": 0.5}},
}  # fmt: skip
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "best": (rlsdk.sft, {"sft.epochs": 2, "sft.lr": 3e-4}),
    "pairs": (rlsdk.dpo, {"preferences.epochs": 2, "preferences.lr": 1e-4, "preferences.sft_coef": 0.2}),
}


def main(rounds: int = 3) -> None:
    start = rlsdk.train(steps=1, view=rlsdk.Quiet()).model  # the quickstart's 50 supervised steps, and one of GRPO
    for keep, (train, settings) in METHODS.items():
        model = start
        for at in range(rounds + 1):
            found = rlsdk.evaluate(model, sets=["greedy"], view=rlsdk.Quiet(), **TASK)
            print(f"{keep}, round {at}: {found['eval/accuracy_greedy']:.1%} of held-out words", flush=True)
            if at < rounds:
                drawn: dict[str, Any] = {"num_prompts": 2048, "samples_per_prompt": 8, "trainer.seed": at}
                rows = rlsdk.generate(model, keep=keep, **drawn, **TASK)
                model = train(model, rows, view=rlsdk.Quiet(), **FORM, **settings).model


if __name__ == "__main__":
    main()
