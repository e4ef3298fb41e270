"""What a person does first, and what can go wrong while they do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import TASK, assert_gone, command, descendants, environment, rlsdk, train_arguments, wait_for

from rlsdk.cli import main
from rlsdk.trainer.checkpoint import CheckpointStore
from rlsdk.trainer.trackers import read_lines, read_metrics

TIMED = ("time/", "throughput/")


def numbers(run: Path) -> list[dict[str, Any]]:
    """A run's metrics without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in read_metrics(run)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """Six steps in one go."""
    folder = tmp_path_factory.mktemp("whole")
    rlsdk(*train_arguments(model, "whole", 6, ["--trainer.save_every_steps", "2"]), cwd=folder)
    return folder / "runs" / "whole"


def test_a_run_leaves_metrics_samples_a_report_and_whole_checkpoints(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted)
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3, 4, 5, 6]
    assert {"eval/accuracy_sampled", "eval/accuracy_greedy"} <= lines[0].keys()
    assert lines[1]["parity/log_prob_diff_max"] < 2e-5
    assert lines[-1]["policy/version"] == 12
    samples = read_lines(uninterrupted / "samples.jsonl")
    assert {"prompt", "response", "answer", "score"} <= samples[0].keys()
    store = CheckpointStore(uninterrupted / "checkpoints", keep=3)
    assert [step for step, _ in store.whole()] == [2, 4, 6]
    assert (uninterrupted / "report.html").is_file()
    assert (uninterrupted / "curves.svg").is_file()


def test_the_written_configuration_runs_again_number_for_number(uninterrupted: Path, tmp_path: Path) -> None:
    config = str(uninterrupted / "config.yaml")
    rlsdk("train", "--config", config, "--trainer.run_name", "again", "--trainer.run_dir", str(tmp_path), cwd=tmp_path)
    assert numbers(tmp_path / "again") == numbers(uninterrupted)


@pytest.mark.parametrize("moment", ["in a step", "in a save"])
def test_a_run_killed_with_9_resumes_number_for_number(
    uninterrupted: Path, model: str, tmp_path: Path, moment: str
) -> None:
    arguments = train_arguments(model, "killed", 6, ["--trainer.save_every_steps", "2"])
    run = tmp_path / "runs" / "killed"
    store = CheckpointStore(run / "checkpoints", keep=3)
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if moment == "in a step":
        wait_for(lambda: len([m for m in read_metrics(run) if "reward/mean" in m]) >= 3, "the third step")
    else:
        wait_for(lambda: list(run.glob("checkpoints/.step_00000004.tmp/actor")), "a save under way")
    others = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert_gone(others)
    newest = store.newest()
    assert newest is not None
    rlsdk(*arguments, cwd=tmp_path)
    assert numbers(run) == numbers(uninterrupted)


def test_ctrl_c_finishes_the_step_saves_and_leaves_nothing_running(model: str, tmp_path: Path) -> None:
    arguments = train_arguments(model, "stopped", 500, ["--eval.every_steps", "null"])
    run = tmp_path / "runs" / "stopped"
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(read_metrics(run)) >= 2, "the second step")
    others = descendants(process.pid)
    # A terminal sends it to the whole process group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert_gone(others)
    done = read_metrics(run)[-1]["step"]
    newest = CheckpointStore(run / "checkpoints", keep=3).newest()
    assert newest is not None
    assert newest.name == f"step_{done:08d}"
    assert f"stopped after {done} steps" in output


def test_generate_eval_and_report_work_on_what_a_run_left(uninterrupted: Path, tmp_path: Path) -> None:
    lines = rlsdk("generate", str(uninterrupted), "--num-prompts", "2", "-n", "2", cwd=tmp_path).splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(answers) == 4
    assert {"prompt", "response", "answer"} <= answers[0].keys()
    rlsdk("eval", str(uninterrupted), "--output", "figures.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    last = read_metrics(uninterrupted)[-1]
    assert figures["eval/accuracy_greedy"] == pytest.approx(last["eval/accuracy_greedy"])
    assert figures["eval/accuracy_sampled"] == pytest.approx(last["eval/accuracy_sampled"])
    assert "report.html" in rlsdk("report", str(uninterrupted), cwd=tmp_path)


def supervised_arguments(model: str, name: str) -> list[str]:
    steps = ["--sft.steps", "40", "--sft.save_every_steps", "10", "--sft.lr", "3e-3"]
    return ["sft", "--model", model, *TASK, *steps, "--trainer.run_name", name]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["sft/loss"] for line in read_metrics(run)}


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[Path, str]:
    """Forty supervised steps in one go, and what was said."""
    folder = tmp_path_factory.mktemp("supervised")
    output = rlsdk(*supervised_arguments(model, "whole"), cwd=folder)
    return folder / "runs" / "whole", output


def test_supervised_training_lowers_its_loss_and_leaves_a_model(supervised: tuple[Path, str]) -> None:
    run, output = supervised
    found = losses(run)
    assert list(found) == list(range(1, 41))
    assert found[40] < 0.6 * found[1]
    assert (run / "model" / "model.safetensors").is_file()
    assert "rlsdk generate" in output


def test_supervised_training_killed_with_9_resumes_number_for_number(
    supervised: tuple[Path, str], model: str, tmp_path: Path
) -> None:
    arguments = supervised_arguments(model, "killed")
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    run = tmp_path / "runs" / "killed"
    wait_for(CheckpointStore(run / "sft_checkpoints", keep=3).newest, "a checkpoint")
    others = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert_gone(others)
    assert "supervised training resumed from" in rlsdk(*arguments, cwd=tmp_path)
    assert losses(run) == losses(supervised[0])


def test_a_reference_policy_a_warm_start_and_an_algorithm_of_a_file_go_together(model: str, tmp_path: Path) -> None:
    extra = ["--algorithm.kl_coef", "0.1", "--sft.steps", "5", "--sft.lr", "1e-3", "--trainer.save_every_steps", "1"]
    own = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
    extra += ["--algorithm.advantage", f"{own}:best_of_group", "--algorithm.loss", f"{own}:reinforce"]
    extra += ["--algorithm.loss_options", "{limit: 4.0}", "--trainer.callbacks", f"[{own}:warn_when_short]"]
    extra += ["--trainer.updates_per_step", "1"]
    rlsdk(*train_arguments(model, "ref", 2, extra), cwd=tmp_path)
    lines = [line for line in read_metrics(tmp_path / "runs" / "ref") if "policy/kl" in line]
    assert abs(lines[0]["policy/kl"]) < 1e-6 < lines[1]["policy/kl"]
    rlsdk(*train_arguments(model, "ref", 3, extra), cwd=tmp_path)
    assert max(line["step"] for line in read_metrics(tmp_path / "runs" / "ref") if "reward/mean" in line) == 3


REFUSALS = [
    (["--trainer.stepz", "3"], ["trainer.stepz", "'steps'"]),
    (["--train-backend", "fspd"], ["fspd", "fsdp"]),
    (["--rollout-backend", "nothing"], ["nothing", "transformers"]),
    (["--trainer.samples_per_prompt", "1"], ["samples_per_prompt", "at least 2"]),
    (["--trainer.prompts_per_step", "many"], ["prompts_per_step", "'many'"]),
    (["--placement.devices_per_node", "2"], ["torch", "devices_per_node"]),
    (["--data", "nowhere.jsonl", "--data.options", "{}"], ["nowhere.jsonl"]),
    (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
    (["--reward", "gsm9k"], ["gsm9k", "gsm8k"]),
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
