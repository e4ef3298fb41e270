"""Schedules on a real cluster of two pools: the same numbers as in one process, one after the other or at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import REWARD, SUMS, rlsdk

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from test_loop import Recorder, trainer_of

from rlsdk.config import load_config
from rlsdk.registry import Registry

TASK = [
    "--data", str(SUMS), "--reward", f"{REWARD}:share_of_digits",
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "5", "--trainer.prompts_per_step", "4",
    "--trainer.samples_per_prompt", "4", "--trainer.updates_per_step", "2", "--trainer.steps", "4",
    "--train.optim.lr", "1e-3", "--train.optim.warmup_steps", "0", "--train.micro_batch_tokens", "2048",
    "--tracking.trackers", "[jsonl]", "--trainer.save_every_steps", "null", "--placement.device", "cpu",
]  # fmt: skip
EVALS = ["--eval.every_steps", "2", "--eval.at_start", "false", "--data.num_eval_rows", "8"]
APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]


def measured(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what depends on the clock."""
    dropped = ("time/", "throughput/", "eval/", "unix_time", "sync/")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def in_one_process(model: str, arguments: Sequence[str], folder: Path) -> Recorder:
    torch.set_num_threads(1)
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    view = Recorder()
    with trainer_of(load_config([], ["--model", model, *arguments], registry), registry, folder, view) as (trainer, *_):
        trainer.fit()
    return view


@pytest.mark.parametrize(("ray", "plain"), [([*APART], []), ([*APART, "--schedule.max_staleness", "1"], None)])
def test_two_pools_on_a_cluster_give_the_numbers_of_one_process(
    ray: list[str], plain: list[str] | None, model: str, tmp_path: Path
) -> None:
    """Staleness 0 apart is the synchronous run on shared devices; staleness 1 does not depend on who runs where."""
    rlsdk("train", "--model", model, *TASK, *EVALS, *ray, "--trainer.run_name", "ray", cwd=tmp_path)
    found = [json.loads(line) for line in (tmp_path / "runs" / "ray" / "metrics.jsonl").read_text().splitlines()]
    view = in_one_process(model, [*TASK, *EVALS, *(ray if plain is None else plain)], tmp_path / "here")
    steps = [line for line in found if "policy/loss" in line]
    names = view.steps[0].keys()
    mine = [{name: step[name] for name in names if name in step} for step in steps]
    assert measured(mine) == measured([dict(step) for step in view.steps])
    evals = [line["eval/reward_sampled"] for line in found if "eval/reward_sampled" in line]
    assert evals == [e["eval/reward_sampled"] for e in view.evals]
