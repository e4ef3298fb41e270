"""What a person does first, and what can go wrong while they do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    ANSWERS,
    GENERATED,
    WHOLE,
    assert_gone,
    command,
    descendants,
    environment,
    kill_when,
    rlsdk,
    train_arguments,
    wait_for,
)

from rlsdk.cli import main
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.tracking.trackers import read_lines, read_metrics

TIMED = ("time/", "throughput/", "sft/step_s")
OWN = Path(__file__).parents[2] / "examples" / "own_algorithm.py"


def numbers(run: Path) -> list[dict[str, Any]]:
    """A run's metrics without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in read_metrics(run)]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of its steps of reinforcement learning."""
    return [line for line in read_metrics(run) if "reward/mean" in line]


def test_a_run_leaves_metrics_samples_a_report_and_whole_checkpoints(uninterrupted: Path) -> None:
    steps = steps_of(uninterrupted)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert {"eval/accuracy_sampled", "eval/accuracy_greedy"} <= read_metrics(uninterrupted)[0].keys()
    assert steps[0]["parity/log_prob_diff_max"] < 2e-5
    assert steps[-1]["policy/version"] == 12
    # Measured from what the warm start came to: from the model before it, it would be hundreds of times as much.
    assert 0 < steps[0]["policy/kl"] < 0.01
    samples = read_lines(uninterrupted / "samples.jsonl")
    assert {"prompt", "response", "answer", "score"} <= samples[0].keys()
    store = CheckpointStore(uninterrupted / "checkpoints", keep=3)
    assert [step for step, _ in store.whole()] == [2, 4, 6]
    assert (uninterrupted / "report.html").is_file()
    assert (uninterrupted / "curves.svg").is_file()


def test_a_run_killed_with_9_again_and_again_resumes_number_for_number(
    uninterrupted: Path, model: str, tmp_path: Path
) -> None:
    """In its warm start, in a save and in a step; at last it goes on by the configuration that it has written."""
    arguments = train_arguments(model, "killed", 6, WHOLE)
    run = tmp_path / "runs" / "killed"
    store = CheckpointStore(run / "checkpoints", keep=3)
    first = CheckpointStore(run / "sft_checkpoints", keep=3)
    kill_when(first.newest, "a checkpoint of the warm start", arguments, tmp_path)
    assert store.newest() is None
    saves = [run / "checkpoints" / f".step_{step:08d}.tmp" / "actor" for step in (4, 6)]
    kill_when(lambda: any(map(Path.exists, saves)), "a save under way", arguments, tmp_path)
    assert store.newest() is not None
    seen = len(read_lines(run / "metrics.jsonl"))
    kill_when(lambda: len(read_lines(run / "metrics.jsonl")) > seen, "another step", arguments, tmp_path)
    output = rlsdk("train", "--config", str(run / "config.yaml"), "--trust-run", cwd=tmp_path)
    assert "resumed from" in output
    assert numbers(run) == numbers(uninterrupted)


def test_another_run_goes_on_against_the_reference_of_the_first(uninterrupted: Path, tmp_path: Path) -> None:
    """As the command does that a finished run prints, from a folder of its own."""
    arguments = ["--config", str(uninterrupted / "config.yaml"), "--resume", str(uninterrupted), "--steps", "7"]
    rlsdk("train", *arguments, "--trust-run", "--trainer.run_name", "more", cwd=tmp_path)
    run = tmp_path / "runs" / "more"
    (step,) = steps_of(run)
    assert step["step"] == 7
    assert 0 < step["policy/kl"] < 0.01
    assert not (run / "reference").exists()
    newest = CheckpointStore(run / "checkpoints", keep=3).newest()
    assert newest is not None
    assert read_state(newest)["reference"]["path"] == str(uninterrupted / "reference")


def test_ctrl_c_finishes_the_step_saves_and_leaves_nothing_running(model: str, tmp_path: Path) -> None:
    """With an algorithm of a file, and a task that is generated."""
    extra = ["--algorithm.advantage", f"{OWN}:best_of_group", "--algorithm.loss", f"{OWN}:reinforce"]
    extra += ["--algorithm.loss_options", "{limit: 4.0}", "--trainer.callbacks", f"[{OWN}:warn_when_short]"]
    arguments = train_arguments(model, "stopped", 500, [*GENERATED, *extra, "--eval.every_steps", "null"])
    run = tmp_path / "runs" / "stopped"
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(read_metrics(run)) >= 2, "the second step")
    others = descendants(process.pid)
    # A terminal sends it to the whole process group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert_gone(others)
    done = read_metrics(run)[-1]["step"]
    newest = CheckpointStore(run / "checkpoints", keep=3).newest()
    assert newest is not None
    assert newest.name == f"step_{done:08d}"
    assert f"stopped after {done} steps" in output
    ratios = [line["policy/ratio"] for line in read_metrics(run) if "policy/ratio" in line]
    assert ratios
    assert all(0 < ratio <= 4 for ratio in ratios)


def test_ctrl_c_in_the_warm_start_saves_it_and_starts_nothing_else(model: str, tmp_path: Path) -> None:
    arguments = train_arguments(model, "early", 4, ["--sft.steps", "900", "--sft.lr", "1e-3"])
    run = tmp_path / "runs" / "early"
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(read_metrics(run)) >= 2, "the second step")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "rollout: starting" not in output
    assert "eval after" not in output
    done = read_metrics(run)[-1]["step"]
    assert 2 <= done < 900
    assert f"stopped in supervised training, after {done} of 900 steps of it" in output
    assert "train --config runs/early/config.yaml --resume runs/early" in output
    newest = CheckpointStore(run / "sft_checkpoints", keep=3).newest()
    assert newest is not None
    assert newest.name == f"step_{done:08d}"


def test_training_imports_nothing_from_the_folder_of_its_data(uninterrupted: Path, trapped: Path) -> None:
    assert not trapped.exists(), trapped.read_text()


def test_generate_eval_and_report_work_on_what_a_run_left(uninterrupted: Path, trapped: Path, tmp_path: Path) -> None:
    """Eval and the next two are typed in the run's folder, of which no process of theirs imports a module."""
    lines = rlsdk("generate", str(uninterrupted), "--num-prompts", "2", "-n", "2", cwd=tmp_path).splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(answers) == 4
    assert {"prompt", "response", "answer"} <= answers[0].keys()
    rlsdk("eval", ".", "--output", str(tmp_path / "figures.json"), "--trust-run", cwd=uninterrupted)
    rlsdk("plan", "--config", "config.yaml", "--trust-run", cwd=uninterrupted)
    rlsdk("plugins", "list", cwd=uninterrupted)
    assert not trapped.exists(), trapped.read_text()
    figures = json.loads((tmp_path / "figures.json").read_text())
    last = steps_of(uninterrupted)[-1]
    assert figures["eval/accuracy_greedy"] == pytest.approx(last["eval/accuracy_greedy"])
    assert figures["eval/accuracy_sampled"] == pytest.approx(last["eval/accuracy_sampled"])
    assert "report.html" in rlsdk("report", str(uninterrupted), cwd=tmp_path)


def test_supervised_training_lowers_its_loss_and_leaves_a_model(model: str, tmp_path: Path) -> None:
    extra = ["--sft.steps", "40", "--sft.lr", "3e-3", "--trainer.run_name", "supervised"]
    output = rlsdk("sft", "--model", model, *ANSWERS, *extra, cwd=tmp_path)
    run = tmp_path / "runs" / "supervised"
    losses = {line["step"]: line["sft/loss"] for line in read_metrics(run) if "sft/loss" in line}
    assert list(losses) == list(range(1, 41))
    assert losses[40] < 0.6 * losses[1]
    assert (run / "model" / "model.safetensors").is_file()
    assert "rlsdk generate" in output


REFUSALS = [
    (["--trainer.stepz", "3"], ["trainer.stepz", "'steps'"]),
    (["--train-backend", "fspd"], ["fspd", "fsdp"]),
    (["--rollout-backend", "nothing"], ["nothing", "transformers"]),
    (["--trainer.samples_per_prompt", "1"], ["samples_per_prompt", "at least 2"]),
    (["--trainer.prompts_per_step", "many"], ["prompts_per_step", "'many'"]),
    (["--placement.devices_per_node", "2"], ["torch", "devices_per_node"]),
    (["--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
    (["--reward", "gsm9k"], ["gsm9k", "gsm8k"]),
    (["--trainer.resume", "runs/nothing"], ["trainer.resume", "runs/nothing", "'auto'"]),
]


def test_a_refused_command_leaves_with_2_and_no_traceback(model: str, tmp_path: Path) -> None:
    output = rlsdk(*train_arguments(model, "refused", 2, ["--trainer.stepz", "3"]), cwd=tmp_path, expect=2)
    assert "Traceback" not in output


@pytest.mark.parametrize(("change", "expected"), REFUSALS, ids=lambda value: str(value[0]) if value else "")
def test_bad_input_is_refused_by_name_before_anything_starts(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(train_arguments(model, "refused", 2, change))
    said = "".join(capsys.readouterr())
    assert left.value.code == 2, said
    for word in expected:
        assert word in said, said
    assert not (tmp_path / "runs").exists()
