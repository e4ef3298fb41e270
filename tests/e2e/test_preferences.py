"""`rlsdk reward-model` and `rlsdk dpo` on the real cluster: ranks that share pairs, and what the commands leave."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REWARD, rlsdk

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from pair_runs import run

from rlsdk.config import PairTraining, load_config
from rlsdk.registry import Registry
from rlsdk.trainer.tracking.trackers import read_metrics

TASK = [
    "--data.max_prompt_tokens", "96", "--data.num_eval_rows", "12",
    "--rollout.max_response_tokens", "9", "--preferences.pairs_per_step", "7", "--preferences.lr", "1e-3",
    "--preferences.steps", "3", "--train.micro_batch_rows", "4", "--tracking.trackers", "[jsonl]",
]  # fmt: skip
ROWS = {PairTraining.KTO: "answers", PairTraining.PROCESS_REWARD: "steps"}
TWO = ["--train-backend", "fsdp", "--placement.devices_per_node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose rows are of very unlike length, so that a split by rows alone would part most of them."""
    folder = tmp_path_factory.mktemp("runs")
    drawn = random.Random(3)
    lines = [
        json.dumps(
            {
                "question": f"{at} + {at} =",
                "chosen": str(drawn.randint(0, 9)),
                "rejected": "no" * (1 + at % 4),
                "answer": "yes" if at % 3 else "no",
                "label": at % 3 > 0,
                "completions": ["no", "yes"][: 1 + at % 2],
                "labels": [at % 3 > 0, False][: 1 + at % 2],
            }
        )
        for at in range(60)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def task(model: str, folder: Path) -> list[str]:
    return ["--model", model, "--data", str(folder / "pairs.jsonl"), *TASK]


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [step for step in read_metrics(folder / "runs" / name) if any(key.endswith("/loss") for key in step)]


@pytest.mark.parametrize(("command", "kind"), [(kind.value, kind) for kind in PairTraining])
def test_two_ranks_take_the_steps_of_one(command: str, kind: PairTraining, folder: Path, model: str) -> None:
    """Loss and gradient of each step: both rows of every pair reach the same rank, and the same micro-batch."""
    label, registry = command.replace("-", "_"), Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    torch.set_num_threads(1)
    own = ["--preferences.step_separator", ";"] if kind is PairTraining.PROCESS_REWARD else []
    one = run(load_config([], [*task(model, folder), *own], registry), kind, registry, folder / label).view.steps
    said = rlsdk(command, *task(model, folder), *own, "--trainer.run_name", f"{label}-2", *TWO, cwd=folder)
    two = metrics(folder, f"{label}-2")
    assert len(one) == len(two) == 3
    assert {"loss", "grad_norm", "accuracy"} <= one[0].keys()
    for step, (mine, theirs) in enumerate(zip(two, one, strict=True)):
        for name in theirs:
            if (step, name) == (0, "accuracy") and label in ("dpo", "kto"):
                continue  # The policy still is its reference: every margin is 0, give or take a rounding.
            assert mine[f"{label}/{name}"] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), name
    assert f"accuracy on held-out {ROWS.get(kind, 'pairs')}" in said
    assert (folder / "runs" / f"{label}-2" / "model" / "config.json").is_file()


def test_a_run_of_train_loads_the_reward_model_that_the_command_left(folder: Path, model: str) -> None:
    trained = folder / "runs" / "reward_model-2" / "model"
    rlsdk(
        "train", "--model", model, "--data", "pairs.jsonl", "--data.max_prompt_tokens", "96", "--reward_models",
        f"[{{path: {trained}}}]", "--rewards", f"[{{name: '{REWARD}:share_of_digits', weight: 0.0}}]",
        "--rollout.max_response_tokens", "6", "--trainer.prompts_per_step", "4", "--trainer.samples_per_prompt", "4",
        "--trainer.steps", "1", "--eval.every_steps", "null", "--tracking.trackers", "[jsonl]",
        "--trainer.run_name", "rl",
        cwd=folder,
    )  # fmt: skip
    (step,) = read_metrics(folder / "runs" / "rl")
    assert step["reward/reward"] == pytest.approx(step["reward/mean"], abs=1e-5)


def test_what_belongs_to_the_other_command_is_refused_before_a_folder_is_made(folder: Path, model: str) -> None:
    never = ["--trainer.run_name", "never", "--preferences.center_coef", "0.1"]
    said = rlsdk("dpo", *task(model, folder), *never, cwd=folder, expect=2)
    assert "preferences.center_coef" in said
    assert "no effect on `rlsdk dpo`" in said
    assert not (folder / "runs" / "never").exists()
    assert "--preferences.beta" in rlsdk("dpo", "--help", "preferences", cwd=folder)
