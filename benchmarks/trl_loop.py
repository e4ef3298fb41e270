"""The quickstart's GRPO in TRL's `GRPOTrainer`: `python -m benchmarks.trl_loop MODEL WORDS --steps 30`.

Runs in an environment that has `trl`; `compare_trl` makes one. Set to do what `bare_loop` does: one update a step under
the weights that sampled, no KL, whole batches, nothing recomputed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.bare_loop import LR, MAX_NEW, PROMPTS, SAMPLES, score
from benchmarks.marks import mark


class Marks(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark(state.global_step, TimedTrainer.parts)
        TimedTrainer.parts.clear()


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    parts: ClassVar[dict[str, float]] = {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        TimedTrainer.parts["generate_s"] = time.perf_counter() - start
        return result


def reward(completions: list[str], word: list[str], **_: Any) -> list[float]:
    return [score(text, name) for text, name in zip(completions, word, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("words", type=Path, help="one a line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    words = args.words.read_text(encoding="utf-8").split()[: args.steps * PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=MAX_NEW,
            temperature=1.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            beta=0.0,
            max_steps=args.steps,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            logging_steps=args.steps,
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"{word}>" for word in words], "word": words}),
            callbacks=[Marks()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
