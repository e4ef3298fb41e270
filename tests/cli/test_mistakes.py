"""Mistakes that people make: one line that names the field, the value, the nearest choice; nothing is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlsdk.cli import main
from rlsdk.diagnosis.cluster import cluster
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore

TASK = ["--model", "m1", "--data", "rows.jsonl", "--reward", "mine.py:fn", "--data.num_eval_rows", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("work")
    main_exits_with(0, ["make-model", str(made / "m1")])
    rows = [json.dumps({"question": f"{a}+1=", "answer": str(a + 1)}) for a in range(20)]
    (made / "rows.jsonl").write_text("\n".join(rows))
    (made / "mine.py").write_text("def fn(sample):\n    return 1.0\n")
    (made / "imports.py").write_text(
        '"""Mine."""\nimport json\nfrom no_such_thing.part import x\n\n\ndef fn(sample):\n    return 1.0\n'
    )
    (made / "run.yaml").write_text("trainer: {steps: 3}\n")
    (made / "empty.jsonl").write_text("")
    (made / "typo.jsonl").write_text('{"promt": "1+1", "answer": "2"}\n' * 8)
    (made / "broken.jsonl").write_text('{"question": "1+1"}\n{"question": oops\n')
    (made / "one.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 8)
    (made / "unsolved.jsonl").write_text("".join(f'{{"question": "{n}", "letter": "B"}}\n' for n in range(9)))
    (made / "pairs.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}", "chosen": "a", "rejected": "b"}) + "\n" for n in range(20))
    )
    (made / "bare").mkdir()
    return made


def main_exits_with(code: int, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert (left.value.code or 0) == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "empty.jsonl"], ["data.train", "empty.jsonl", "has no rows"]),
        (
            ["--data", "typo.jsonl"],
            ["data.train", "typo.jsonl:1", "'question'", "--data.prompt_field FIELD"],
        ),
        (["--data", "broken.jsonl"], ["data.train", "broken.jsonl:2", "not JSON"]),
        (
            ["--data.num_eval_rows", "200"],
            ["cannot hold out 200", "20 distinct", "`--data.num_eval_rows 2`"],
        ),
        (["--data", "one.jsonl"], ["8 rows with 1 distinct question;"]),
        (
            ["--data", "unsolved.jsonl", "--reward", "choice"],
            ["(choice): none of the 9 rows", "unsolved.jsonl:1", "--data.answer_field FIELD", "'letter'"],
        ),
        (
            ["--reward", "choice"],
            ["none of the 20 rows", "rows.jsonl:1", "reference answer '1' is not a single letter"],
        ),
        (["--data.prompt_template", "{promt} hi"], ["no field 'promt'", "did you mean 'prompt'?"]),
        (["--data.prompts_per_step", "4"], ["unknown key; did you mean trainer.prompts_per_step?"]),
        (["--trainer.steps"], ["trainer.steps: no value was given", "--trainer.steps VALUE"]),
        (["--eval"], ["eval: no value was given", "--eval.FIELD VALUE"]),
        (["--plan"], ["plan: unknown key", "`rlsdk plan` with the same arguments"]),
        (["--train.device", "cuda"], ["train.device: unknown key", "did you mean placement.device?"]),
        (["--optim.lr", "0.1"], ["optim: unknown key; did you mean train.optim or critic.optim?"]),
        (["--lr", "0.1"], ["lr: unknown key", "did you mean train.optim.lr or "]),
        (["--learning_rate", "0.1"], ["learning_rate: unknown key", "did you mean train.optim.lr or "]),
        (["--batch_size", "4"], ["batch_size: unknown key", "did you mean trainer.prompts_per_step"]),
        (["--data.path", "rows.jsonl"], ["data.path: unknown key", "did you mean data.train?"]),
        (["--algorithm", "gpro"], ["did you mean 'grpo'?"]),
        (["--tracking.trackers", "[jsonl, wand]"], ["did you mean 'wandb'?"]),
        (["--reward", "mine.py"], ["expected FILE.py:FUNCTION, such as mine.py:my_function"]),
        (["--reward", "imports.py:fn"], ["imports.py:3 imports 'no_such_thing.part'", "Is it installed in"]),
        (["--reward", "min.py:fn"], ["there is no file", "min.py'; did you mean 'mine.py'?"]),
        (["--reward", "zz.py:fn"], ["there is no file", "zz.py'; this folder has imports.py, mine.py"]),
        (["--reward", "bar/mine.py:fn"], ["the folder '", "bar' does not exist either; did you mean 'bare'?"]),
        (["--algorithm.loss", "zz.py:fn"], ["zz.py'; this folder has imports.py, mine.py"]),
        (["--data", "bare/rows.jsonl"], ["rows.jsonl: no such file; 'bare' has no file that ends in .jsonl or "]),
        (["--config", "other.yml"], ["no such file; this folder has run.yaml"]),
        (["--model", "bare"], ["model.path", "holds no config.json", "Hugging Face"]),
        (["--tracking", "[wandb]"], ["tracking: ['wandb']: expected a mapping with the keys ", "trackers"]),
        (["--halp"], ["argument '--halp': did you mean --help?"]),
        (["--model", ""], ["model.path '': is empty"]),
        (["--data", ""], ["data source '': is empty"]),
        (["--model.dtype", "float8"], ["model.dtype: 'float8': expected one of 'auto', 'float32'"]),
        (["--model", "m1x"], ["model.path 'm1x': no such folder here", "did you mean 'm1'?"]),
        (["--model.tokenizer", "./m1x"], ["model.tokenizer: './m1x': no such folder; did you mean 'm1'?"]),
        (["-model", "m1"], ["flags begin with two dashes: --model"]),
        (["run.yaml"], ["a file is given as --config run.yaml"]),
        (["--config", "runn.yaml"], ["'runn.yaml': no such file; did you mean 'run.yaml'?"]),
        (["--config", "${HOME}/run.yaml"], ["no such file; the shell replaces variables outside of single quotes"]),
    ],
    ids=lambda value: " ".join(value[:2]) if value and value[0].startswith("-") else None,
)
def test_a_mistake_costs_one_line_and_nothing_is_started(
    arguments: list[str],
    said: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    rest = [*TASK]
    if arguments[0] in rest:  # given twice, a reward would be added
        at = rest.index(arguments[0])
        del rest[at : at + 2]
    before = sorted(folder.iterdir())
    main_exits_with(2, ["train", *rest, *arguments])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert [part for part in said if part not in printed.err] == [], printed.err
    assert "Errno" not in printed.err
    assert sorted(folder.iterdir()) == before


def test_all_that_is_wrong_with_a_start_is_said_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is not there, a model that is too small, a library that is missing, two fields that do not agree and
    a function that does not exist are five mistakes, which cost five starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("rlsdk.config.checks.check.NIXL", ("no_nixl_here",))
    main_exits_with(
        2,
        ["train", "--model", "m1", "--data", "row.jsonl", "--reward", "mine.py:fm", "--rollout.max_response_tokens",
         "4096", "--sharding.transport", "nixl", "--trainer.steps", "2", "--train.optim.schedule", "linear",
         "--train.optim.warmup_steps", "50", "--trainer.export_every_steps", "3", "--trainer.save_every_steps", "2"],
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "error: 6 problems in the configuration:" in said
    fields = ["trainer.export_every_steps: 3", "train.optim.warmup_steps: 50", "data.train", "mine.py:fm",
              "rollout.max_response_tokens: 4096", "sharding.transport: 'nixl'"]  # fmt: skip
    assert [field for field in fields if field not in said] == [], said
    assert "did you mean 'rows.jsonl'?" in said
    assert "pip install 'rlsdk[nixl]'" in said


def test_a_resumed_run_with_another_model_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    checkpoint = folder / "runs" / "old" / "checkpoints" / "step_00000002"
    other = json.loads((folder / "m1" / "config.json").read_text()) | {"hidden_size": 192}

    with CheckpointStore(checkpoint.parent, 1).write(2, {}) as draft:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text(json.dumps(other))
    main_exits_with(2, ["train", *TASK, "--trainer.run_name", "old"])
    said = capsys.readouterr().err
    assert "hidden_size 192 there and 128 here" in said
    assert "--trainer.resume never" in said
    shutil.rmtree(folder / "runs")


def test_devices_that_are_not_there_are_said_before_a_run_has_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("rlsdk.cluster.ray_cluster.local.count_gpus", lambda: 0)
    before = sorted(folder.iterdir())
    main_exits_with(2, ["train", *TASK, "--placement.device", "cuda"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "asks for 1 GPU" in printed.err
    assert "`--placement.device cpu`" in printed.err
    assert sorted(folder.iterdir()) == before


def test_nothing_to_learn_is_said_before_a_run_has_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    main_exits_with(2, ["sft", "--model", "m1", "--data", "rows.jsonl", "--data.num_eval_rows", "4"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "sft.steps: 0: trains nothing; give --sft.steps N or --sft.epochs N" in printed.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], ["rows.jsonl:1", "no field 'chosen'", "`--preferences.chosen_field FIELD`"]),
        (["--preferences.chosen_field", "answer", "--preferences.rejected_field", "question",
          "--data.num_eval_rows", "200"],
         ["cannot hold out 200", "`--data.num_eval_rows 2`"]),
    ],
    ids=["field", "hold-out"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_rows_of_pairs_are_looked_at_before_anything_starts(
    command: str,
    more: list[str],
    said: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was 10 s in, after Ray, with a folder's name printed."""
    monkeypatch.chdir(folder)
    main_exits_with(2, [command, "--model", "m1", "--data", "rows.jsonl", *more])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [part for part in said if part not in printed.err] == [], printed.err
    assert not (folder / "runs").exists()


MODEL_DAMAGE: dict[str, Any] = {
    "cut": (lambda model: os.truncate(model / "model.safetensors", 9000), "model.safetensors is cut short: 9,000 of "),
    "empty": (
        lambda model: os.truncate(model / "model.safetensors", 0),
        "model.safetensors is empty; copy or download",
    ),
    "none": (lambda model: (model / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "tokenizer": (
        lambda model: [file.unlink() for file in model.glob("tokenizer*")],
        "holds no tokenizer (tokenizer.json,",
    ),
    "config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "config-cut": (lambda model: os.truncate(model / "config.json", 20), "config.json"),
}


COMMANDS = [
    ["train", "--model", "broken", "--data", "rows.jsonl", "--reward", "mine.py:fn", "--data.num_eval_rows", "4"],
    ["sft", "--sft.steps", "1", "--model", "broken", "--data", "rows.jsonl", "--data.num_eval_rows", "4"],
    ["dpo", "--model", "broken", "--data", "pairs.jsonl", "--data.num_eval_rows", "4"],
    ["reward-model", "--model", "broken", "--data", "pairs.jsonl", "--data.num_eval_rows", "4"],
    ["eval", "broken", "--data", "rows.jsonl", "--reward", "mine.py:fn"],
    ["generate", "broken", "--prompt", "1+1="],
    ["plan", "--model", "broken", "--data", "rows.jsonl", "--reward", "mine.py:fn", "--data.num_eval_rows", "4"],
]
# Plans read `config.json` alone.
BROKEN = [(c, damage) for c in COMMANDS for damage in MODEL_DAMAGE if c[0] != "plan" or "config" in damage]


@pytest.mark.parametrize(("command", "damage"), BROKEN, ids=lambda part: part if isinstance(part, str) else part[0])
def test_a_broken_model_is_found_out_before_a_device_is_taken(
    command: list[str],
    damage: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was said by a worker, behind Ray's start and the lines of a run."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("rlsdk.cluster.cluster.connect", lambda *_, **__: pytest.fail("a cluster is started"))
    shutil.copytree(folder / "m1", folder / "broken")
    apply, said = MODEL_DAMAGE[damage]
    apply(folder / "broken")
    before = sorted(folder.iterdir())
    try:
        main_exits_with(2, command)
        assert sorted(folder.iterdir()) == before
    finally:
        shutil.rmtree(folder / "broken")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "broken" in printed.err
    assert printed.err.count("\n") == 1, printed.err


def test_random_weights_need_no_file_of_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "m1", folder / "bare_model")
    (folder / "bare_model" / "model.safetensors").unlink()
    main_exits_with(2, ["sft", "--model", "bare_model", "--data", "nowhere.jsonl", "--model.init_from_config"])
    said = capsys.readouterr().err
    shutil.rmtree(folder / "bare_model")
    assert "nowhere.jsonl: no such file" in said
    assert "safetensors" not in said


def test_a_check_of_a_misspelt_backend_says_so_even_without_pytest() -> None:
    """In an environment of a user, not one in which only the look for pytest says that it is missing."""
    without = "import sys; sys.modules['pytest'] = None; from rlsdk.cli import main; main(sys.argv[1:])"

    def said(code: int, *arguments: str) -> str:
        command = [sys.executable, "-c", without, "plugins", "check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "did you mean 'torch'?" in said(2, "trch")
    assert "pip install 'rlsdk[check]'" in said(1, "torch", "--kind", "train")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plugins", "info", "vlm"], ["did you mean 'vllm'?", "pip install rlsdk-vllm"]),
        (["plugins", "info", "gsm8"], ["did you mean 'gsm8k'?"]),
        (["init", "x.yaml", "--model", "m1", "--data", "rows.jsonl", "--reward", "gsm8", "--cpu"],
         ["--reward: 'gsm8'", "did you mean 'gsm8k'?"]),
    ],
    ids=["info", "info-component", "init"],
)  # fmt: skip
def test_other_commands_name_the_nearest_choice_too(
    arguments: list[str],
    said: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    main_exits_with(2, arguments)
    printed = capsys.readouterr()
    assert [part for part in said if part not in printed.err] == [], printed.err
    assert not (folder / "x.yaml").exists()


def test_a_cluster_that_is_not_there_is_found_out_at_once() -> None:
    began = time.monotonic()
    finding = cluster("127.0.0.1:1")
    assert "refused" in finding.found
    assert time.monotonic() - began < 30
