"""The folder of a run: what it resumes from, what is recorded, and that nothing of an earlier attempt is lost."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from rlsdk.config import RunConfig, dump_config, load_config
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.checkpoints.run_folder import (
    ResumePoint,
    accept_config,
    changed_settings,
    check_run_name,
    choose_resume,
    eval_folder,
    make_run_dir,
    run_lock,
)
from rlsdk.trainer.tracking.samples import write_eval_samples


def config_of(*arguments: str) -> RunConfig:
    return load_config([], list(arguments))


def save(run: Path, step: int, config: RunConfig | None = None, folder: str = "checkpoints") -> Path:
    with CheckpointStore(run / folder, 9).write(step, {}) as draft:
        (draft / "weights").write_text(f"of step {step}")
        if config is not None:
            (draft / "config.yaml").write_text(dump_config(config))
    return run / folder / f"step_{step:08d}"


def log(run: Path, *steps: int) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/abs", "a\\b", "a\nb", "a\0", "\x1b[2J", "x" * 300])
def test_a_name_that_leaves_the_folder_or_that_no_file_system_takes_is_refused(tmp_path: Path, name: str) -> None:
    config = config_of("--trainer.run_dir", str(tmp_path))
    trainer = config.trainer.model_copy(update={"run_name": name})
    with pytest.raises(ConfigError, match=r"trainer.run_name .*expected"):
        make_run_dir(config.model_copy(update={"trainer": trainer}))
    assert list(tmp_path.iterdir()) == []
    check_run_name("grpo 1 ä")


@pytest.mark.parametrize("name", ["one", None])
def test_a_run_folder_that_cannot_be_made_is_a_message(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "file").touch()
    arguments = ["--trainer.run_dir", str(tmp_path / "file")] + (["--trainer.run_name", name] if name else [])
    with pytest.raises(ConfigError, match=r"trainer.run_dir: cannot make the folder .*file"):
        make_run_dir(config_of(*arguments))


def test_a_second_process_is_kept_out_and_the_first_one_s_number_stays(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        held = (tmp_path / ".lock").read_text()
        with pytest.raises(ConfigError, match="another process is writing"), run_lock(tmp_path):
            pass
        assert (tmp_path / ".lock").read_text() == held != ""


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "config.history.jsonl", "checkpoints", "timeline.jsonl"])
def test_a_run_that_would_write_or_delete_through_a_link_is_refused(tmp_path: Path, name: str) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("years of work")
    run.mkdir()
    (run / name).symlink_to(precious)
    with pytest.raises(ConfigError, match="is a symbolic link out of the run's folder"), run_lock(run):
        pass
    assert precious.read_text() == "years of work"
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ConfigError, match="neither a file nor a folder"), run_lock(run):
        pass
    (run / name).unlink()
    (run / name).hardlink_to(precious)
    with pytest.raises(ConfigError, match=r"one of 2 names of a file \(hard links\).*`cp -r "), run_lock(run):
        pass
    assert precious.read_text() == "years of work"
    (run / name).unlink()
    (run / "latest").symlink_to("checkpoints")
    with run_lock(run):
        pass


def test_falling_back_past_a_damaged_checkpoint_is_said(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    (newer / "weights").write_text("of step 3")
    said: list[str] = []
    assert choose_resume(config_of(), tmp_path, notice=said.append).checkpoint == older
    assert "step_00000002" in said[0]
    assert "weights is damaged" in said[0]


def test_a_damaged_checkpoint_that_was_named_is_refused_with_the_others(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    (newer / "weights").write_text("of step 3")
    named = config_of("--trainer.resume", str(newer))
    with pytest.raises(CheckpointError, match=f"weights is damaged.*{older.name}"):
        choose_resume(named, tmp_path)
    (newer / "weights").unlink()
    with pytest.raises(ConfigError, match=f"weights is missing.*{older.name}"):
        choose_resume(named, tmp_path)


def test_checkpoints_that_are_all_damaged_are_not_passed_over_for_a_fresh_start(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "weights").write_text("of step 2")
    with pytest.raises(CheckpointError, match=r"every checkpoint .*--trainer.resume never"):
        choose_resume(config_of(), tmp_path)
    assert choose_resume(config_of("--trainer.resume", "never"), tmp_path).checkpoint is None


def test_a_name_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a whole checkpoint"):
        choose_resume(config_of("--trainer.resume", str(tmp_path / "nothing")), tmp_path)


def test_a_run_that_was_stopped_in_its_warm_start_goes_on_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = config_of("--resume", str(run), "--sft.steps", "9")
    with pytest.raises(ConfigError, match="nor a run with one"):
        choose_resume(config, tmp_path)
    half = save(run, 7, folder="sft_checkpoints")
    assert choose_resume(config, tmp_path) == ResumePoint(checkpoint=half, folder="sft_checkpoints")
    assert choose_resume(config, tmp_path, "sft_checkpoints") == choose_resume(config, tmp_path)
    assert choose_resume(config_of("--resume", str(half), "--sft.steps", "9"), tmp_path).folder == "checkpoints"
    with pytest.raises(ConfigError, match="nor a run with one"):
        choose_resume(config_of("--resume", str(run)), tmp_path)  # no warm start is asked for
    trained = save(run, 1)
    assert choose_resume(config, tmp_path) == ResumePoint(checkpoint=trained)
    assert choose_resume(config_of("--sft.steps", "9"), run) == ResumePoint(checkpoint=trained)
    assert choose_resume(config_of("--sft.steps", "9"), tmp_path) == ResumePoint(folder="sft_checkpoints")


def test_a_fresh_start_moves_an_earlier_attempt_aside_and_deletes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    log(tmp_path, 1, 2)
    (tmp_path / "config.yaml").write_text("trainer: {steps: 7}")
    said: list[str] = []
    accept_config(tmp_path, config_of(), checkpoint=None, notice=said.append)
    assert "earlier/1" in said[0]
    aside = tmp_path / "earlier" / "1"
    assert (aside / "checkpoints" / "step_00000100" / "weights").read_text() == "of step 100"
    assert (aside / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (aside / "config.yaml").read_text() == "trainer: {steps: 7}"
    assert not (tmp_path / "metrics.jsonl").exists()
    assert choose_resume(config_of(), tmp_path).checkpoint is None
    assert (
        choose_resume(config_of("--trainer.resume", str(aside)), tmp_path).checkpoint
        == aside / "checkpoints/step_00000100"
    )
    log(tmp_path, 1)
    accept_config(tmp_path, config_of())
    assert (tmp_path / "earlier" / "2" / "metrics.jsonl").exists()


def test_the_first_start_has_nothing_to_move(tmp_path: Path) -> None:
    said: list[str] = []
    accept_config(tmp_path, config_of(), notice=said.append)
    accept_config(tmp_path, config_of(), notice=said.append)
    assert said == []
    assert not (tmp_path / "earlier").exists()
    assert len((tmp_path / "config.history.jsonl").read_text().splitlines()) == 2


def test_going_back_to_an_earlier_step_moves_the_later_ones_aside(tmp_path: Path) -> None:
    early, late = save(tmp_path, 5), save(tmp_path, 10)
    log(tmp_path, 5, 10)
    for step in (0, 5, 10):
        write_eval_samples(
            eval_folder(tmp_path, step), step, {"math": [{"set": "math", "correct": True}]}, compress=True
        )
    said: list[str] = []
    accept_config(tmp_path, config_of(), checkpoint=early, notice=said.append)
    assert "step_00000010" in said[0]
    assert (tmp_path / "earlier" / "1" / "checkpoints" / late.name / "weights").read_text() == "of step 10"
    assert (tmp_path / "earlier" / "1" / "metrics.jsonl").read_text() == '{"step": 5}\n{"step": 10}\n'
    assert choose_resume(config_of(), tmp_path).checkpoint == early
    kept, moved = tmp_path / "eval_samples", tmp_path / "earlier" / "1" / "eval_samples"
    assert sorted(folder.name for folder in kept.iterdir()) == ["step_00000000", "step_00000005"]
    (file,) = moved.glob("step_00000010/math.jsonl.gz")
    assert gzip.decompress(file.read_bytes()) == b'{"step": 10, "set": "math", "correct": true}\n'


def test_going_on_from_the_newest_moves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    log(tmp_path, 5, 10)
    accept_config(tmp_path, config_of(), checkpoint=newest, notice=pytest.fail)
    assert not (tmp_path / "earlier").exists()


def test_changed_settings_are_said_and_kept(tmp_path: Path) -> None:
    before = config_of("--trainer.steps", "5", "--algorithm.loss_options.clip_low", "0.2")
    path = save(tmp_path, 5, before)
    now = config_of("--trainer.steps", "9", "--trainer.resume", str(path), "--rollout.temperature", "0.5")
    said: list[str] = []
    accept_config(tmp_path, now, checkpoint=path, notice=said.append)
    assert sorted(said) == [
        "setting changed since the checkpoint: algorithm.loss_options.clip_low: 0.2 -> null",
        "setting changed since the checkpoint: rollout.temperature: 1.0 -> 0.5",
        "setting changed since the checkpoint: trainer.steps: 5 -> 9",
    ]
    line = json.loads((tmp_path / "config.history.jsonl").read_text())
    assert line["changed"]["trainer.steps"] == [5, 9]
    assert (line["step"], line["checkpoint"]) == (5, str(path))
    assert load_config([tmp_path / "config.yaml"]) == now
    assert changed_settings(None, now) == {}


def test_a_run_that_was_finished_before_says_that_nothing_is_trained() -> None:
    from rlsdk.trainer.runs.start import resumed_line

    assert resumed_line(Path("c/step_2"), 2, 4) == "resumed from c/step_2 at step 2"
    assert "nothing is trained; `--trainer.steps 4` continues" in resumed_line(Path("c/step_2"), 2, 2)
    assert "`--sft.steps 4` continues" in resumed_line(Path("c/step_2"), 2, 2, field="sft.steps")
