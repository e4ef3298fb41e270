"""Two teachers of two tasks, one student: `python -m benchmarks.two_teachers --folder RUNS [--steps 80] [--seeds 3]`.

A teacher learns to spell words backward, the other to put their letters in alphabetical order, by `rlsdk sft`. A
student begins with 50 supervised steps on both tasks, and then learns on its own samples from both teachers, each of
its task, by the exact divergence; or from rewards alone. The table has the share of right words of each task, greedy,
on words that nobody trained on, and its part of the teacher's. Runs that are in the folder already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from rlsdk.data.quickstart import load_quickstart
from rlsdk.kit.model.tokenizers import write_char_tokenizer
from rlsdk.system.atomic import atomic_write_json, atomic_write_text
from rlsdk.trainer.tracking.trackers import read_metrics

TASKS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "backward": (">", lambda word: word[::-1]),
    "in_order": (">>", lambda word: "".join(sorted(word))),
}
"""Name -> what stands behind a word in its prompt, and its answer."""
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": None,
}  # fmt: skip
"""That of the quickstart's model."""
COMMON = (
    "--model.init_from_config", "true", "--data.max_prompt_tokens", "8", "--rollout.max_response_tokens", "6",
    "--sft.rows_per_step", "64", "--sft.lr", "1e-3", "--sft.warmup_steps", "10", "--train.optim.betas", "[0.9, 0.99]",
    "--train.micro_batch_tokens", "32768", "--train.micro_batch_rows", "1024", "--placement.cpus_per_device", "1",
    "--tracking.trackers", "[jsonl]", "--trainer.resume", "never",
)  # fmt: skip
TEACHER_STEPS = 400
WORDS, HELD_OUT = 4000, 256
"""Words of training, and those that are measured."""
VARIANTS = {"teachers, exact": 1.0, "rewards (GRPO)": 0.0}
"""Name -> weight of the teachers; the other of the two is that of the rewards."""


def prepare(folder: Path) -> None:
    """Writes the model's shape with its tokenizer, and the rows of each task."""
    tokenizer = write_char_tokenizer(folder / "model", "abcdefghijklmnopqrstuvwxyz>")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    atomic_write_json(folder / "model" / "config.json", {**SHAPE, **ends, "vocab_size": len(tokenizer)})
    rows = load_quickstart("spell_backward", size=3 * WORDS, seed=42)
    words = list(dict.fromkeys(str(row["answer"])[::-1].lower() for row in rows))
    for name, (end, answer) in TASKS.items():
        lines = [json.dumps({"prompt": f"{word}{end}", "answer": answer(word), "task": name}) for word in words]
        atomic_write_text(folder / f"{name}.jsonl", "\n".join(lines[HELD_OUT : WORDS + HELD_OUT]) + "\n")
        atomic_write_text(folder / f"{name}_held_out.jsonl", "\n".join(lines[:HELD_OUT]) + "\n")


def command(name: str, folder: Path, kind: str, *flags: str) -> None:
    """Runs `rlsdk KIND` into `folder/name`.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    words = [
        sys.executable, "-m", "rlsdk.cli", kind, "--model", str(folder / "model"), *COMMON, *flags,
        "--trainer.run_dir", str(folder), "--trainer.run_name", name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")


def teacher(task: str, folder: Path) -> Path:
    """The trained model of a task, which is made where it is not there yet."""
    made = folder / f"teacher_{task}" / "model"
    if not made.exists():
        rows = (
            "--data",
            str(folder / f"{task}.jsonl"),
            "--sft.steps",
            str(TEACHER_STEPS),
            "--eval.every_steps",
            "null",
        )
        command(f"teacher_{task}", folder, "sft", *rows)
    return made


def accuracy_of(model: Path, task: str, folder: Path) -> float:
    """Share of right held-out words of a teacher, greedy."""
    file = folder / f"teacher_{task}.json"
    if not file.exists():
        words = [
            sys.executable, "-m", "rlsdk.cli", "eval", str(model), "--data.eval",
            str(folder / f"{task}_held_out.jsonl"), "--reward", "exact", "--rollout.max_response_tokens", "6",
            "--data.max_prompt_tokens", "8", "--eval.samples_per_prompt", "0", "--output", str(file),
        ]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True)
    return float(json.loads(file.read_text())["eval/accuracy_greedy"])


def run(name: str, seed: int, steps: int, folder: Path) -> Mapping[str, float]:
    """The last evaluation of a student, which is trained where it is not there yet."""
    weight, run_name = VARIANTS[name], f"{name.partition(' (')[0].replace(', ', '_')}_{seed}"
    if (found := _evaluated(folder / run_name)) is None:
        sets = {task: {"data": str(folder / f"{task}_held_out.jsonl"), "temperature": 0.0} for task in TASKS}
        teachers = [
            {"path": str(teacher(task, folder)), "name": task, "rows": {"task": [task]}, "weight": 1.0}
            for task in TASKS
        ]  # fmt: skip
        learned = ("--teachers", json.dumps(teachers), "--algorithm.distillation.objective", "exact",
                   "--algorithm.distillation.reward_coef", "0.0") if weight else ()  # fmt: skip
        mixture = json.dumps([{"source": str(folder / f"{task}.jsonl")} for task in TASKS])
        command(
            run_name, folder, "train", "--data.mixture", mixture,
            "--reward", "exact", "--sft.steps", "50", "--trainer.steps", str(steps), "--trainer.seed", str(seed),
            "--trainer.prompts_per_step", "64", "--trainer.samples_per_prompt", "8", "--trainer.updates_per_step", "4",
            "--train.optim.lr", "3e-4", "--train.optim.schedule", "linear", "--train.optim.warmup_steps", "20",
            "--algorithm.old_log_probs", "rollout", "--rollout.max_running_samples", "2048",
            "--eval.sets", json.dumps(sets), "--eval.every_steps", str(steps), "--eval.at_start", "false",
            "--schedule.journal", "none", "--trainer.save_every_steps", "null", *learned,
        )  # fmt: skip
        found = _evaluated(folder / run_name)
        assert found is not None
    return found


def _evaluated(folder: Path) -> Mapping[str, float] | None:
    names = [f"eval/{task}/accuracy" for task in TASKS]
    found = [m for m in read_metrics(folder) if all(name in m for name in names)] if folder.exists() else []
    return found[-1] if found else None


def show(found: Mapping[str, Sequence[Mapping[str, float]]], best: Mapping[str, float], seeds: int) -> None:
    table = Table(title=f"{seeds} seeds; right held-out words, greedy, and their part of the teacher's")
    for name in ("learns from", *TASKS):
        table.add_column(name, justify="left" if name == "learns from" else "right")
    table.add_row("(the teacher of each)", *(f"{best[task]:.1%}" for task in TASKS))
    for name, runs in found.items():
        cells = []
        for task in TASKS:
            values = [one[f"eval/{task}/accuracy"] for one in runs]
            spread = f" ±{stdev(values):.1%}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.1%}{spread} ({mean(values) / best[task]:.0%})")
        table.add_row(name, *cells)
    Console(width=120).print(table)


def main() -> None:
    # A run that is under way ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    best = {task: accuracy_of(teacher(task, folder), task, folder) for task in TASKS}
    found: dict[str, list[Mapping[str, float]]] = {}
    for seed in range(args.seeds):
        for name in VARIANTS:
            found.setdefault(name, []).append(run(name, seed, args.steps, folder))
        show(found, best, seed + 1)


if __name__ == "__main__":
    main()
