"""`rlsdk eval` and `rlsdk generate` on a real reference engine in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_loop import HERE, TASK

from rlsdk.api.inference import given_prompts
from rlsdk.cli.models.inference import evaluate, generate
from rlsdk.config import RunConfig, load_config
from rlsdk.data import PromptDataset
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import start_in_process
from rlsdk.trainer.checkpoints.checkpoint import BestRecord, CheckpointStore
from rlsdk.trainer.checkpoints.model_source import find_model
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.runs import inference
from rlsdk.trainer.stages.evaluation.schedule import EvaluationError

REWARD = HERE / "rewards.py"
DATA = TASK[: TASK.index("--trainer.prompts_per_step")]
"""What an evaluation reads of the task."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout engine of the run, without a cluster around it."""

    @contextmanager
    def open_rollout(config: RunConfig, registry: Registry, **_: Any) -> Iterator[RoleGroup]:
        (role,) = roles(config, "cpu", needed=["rollout"])
        yield start_in_process(role.loading_weights(), registry)

    monkeypatch.setattr(inference, "open_rollout", open_rollout)


def arguments(*extra: str, reward: str = "share_of_digits") -> list[str]:
    return [*DATA, "--reward", f"{REWARD}:{reward}", *extra]


def run_eval(model: Path, *extra: str, reward: str = "share_of_digits", **options: Any) -> None:
    chosen: dict[str, Any] = {"sets": [], "checkpoint": None, "output": None, "samples": None}
    evaluate(model, arguments(*extra, reward=reward), **{**chosen, **options})


def test_rewards_that_always_fail_are_an_error_and_no_accuracy_of_zero(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EvaluationError, match=r"8 of 8 samples have no score \(8 exception\); first: exception in .*"):
        run_eval(model, reward="always_fails", output=tmp_path / "figures.json")
    printed = capsys.readouterr().out
    assert "eval/accuracy_greedy" in printed
    assert "0.0000" not in printed.replace("eval/log_prob", "")
    assert json.loads((tmp_path / "figures.json").read_text())["eval/accuracy_greedy"] is None


def test_figures_of_one_set_and_its_samples(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"short": {"num_rows": 2, "temperature": 0.0, "correct_from": 0.5}, "many": {"samples_per_prompt": 4}}
    flags = ["--eval.sets", json.dumps(sets), "--eval.save_samples", "plain"]
    run_eval(model, *flags, sets=["short"], output=tmp_path / "f.json", samples=tmp_path / "all")
    printed = capsys.readouterr().out
    assert "share_of_digits >= 0.5" in printed
    assert "eval/many" not in printed
    rows = [json.loads(line) for line in (tmp_path / "all" / "short.jsonl").read_text().splitlines()]
    figures = json.loads((tmp_path / "f.json").read_text())
    assert len(rows) == 2
    assert figures["eval/short/reward"] == pytest.approx(sum(row["score"] for row in rows) / 2)
    with pytest.raises(ConfigError, match=r"--set 'shrot': expected one of \['short', 'many'\]; did you mean 'short'"):
        run_eval(model, *flags, sets=["shrot"], samples=tmp_path / "all")
    with pytest.raises(ConfigError, match=r"eval\.save_samples: has no effect .* without `--samples FOLDER`"):
        run_eval(model, *flags)


def test_only_what_is_used_is_tokenized(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 seconds for the training rows of GSM8K, which nobody asked for."""
    seen: list[int] = []
    made = PromptDataset.__init__

    def counted(self: PromptDataset, rows: Any, *args: Any, **more: Any) -> None:
        seen.append(len(rows))
        made(self, rows, *args, **more)

    monkeypatch.setattr(PromptDataset, "__init__", counted)
    run_eval(model)
    assert seen == [8]  # of the 100 rows that there are
    generate(model, [], 3, 2, None, DATA)
    assert seen == [8, 8]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(lines) == 6
    assert len({line["prompt"] for line in lines}) == 3


def test_a_typed_prompt_is_rendered_like_a_row_of_the_data(model: Path, tmp_path: Path) -> None:
    """It went to the model as it was typed, without system prompt, prompt template and chat template."""
    chat = shutil.copytree(model, tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    (chat / "chat_template.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"asked": "1 + 2 =", "answer": "3"}))
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    config = load_config(
        [],
        ["--model", str(chat), "--data.eval", str(tmp_path / "rows.jsonl"), "--data.prompt_field", "asked",
         "--data.prompt_template", "Q: {asked}", "--data.system_prompt", "Be brief.",
         "--rollout.max_response_tokens", "5"],
        registry,
    )  # fmt: skip
    count = {"num_prompts": 1, "num_samples": 2}
    [(row, expected)] = inference.sample_prompts(config, registry, [], **count)
    [(typed, found)] = inference.sample_prompts(config, registry, ["1 + 2 ="], **count)
    assert row.text.endswith("[system] Be brief.\n[user] Q: 1 + 2 =\n[assistant] ")
    assert (typed.text, typed.prompt_ids) == (row.text, row.prompt_ids)
    assert (row.answer, typed.answer) == ("3", None)
    assert found == expected


def test_a_conversation_is_rendered_by_the_chat_template(model: Path, tmp_path: Path) -> None:
    """Its last turn of the user gives the same tokens and samples as the same text, typed."""
    chat = shutil.copytree(model, tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    (chat / "chat_template.jinja").write_text(template)
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    config = load_config([], ["--model", str(chat), "--rollout.max_response_tokens", "5"], registry)
    asked, count = {"role": "user", "content": "1 + 2 ="}, {"num_prompts": 1, "num_samples": 2}
    [(typed, expected)] = inference.sample_prompts(config, registry, ["1 + 2 ="], **count)
    [(prompt, found)] = inference.sample_prompts(config, registry, [[asked]], **count)
    assert (prompt.prompt_ids, found) == (typed.prompt_ids, expected)
    turns = [{"role": "system", "content": "Sum."}, asked, {"role": "assistant", "content": "3"}, asked]
    [(longer, _)] = inference.sample_prompts(config, registry, [turns], **count)
    assert longer.text.endswith("[system] Sum.\n[user] 1 + 2 =\n[assistant] 3\n[user] 1 + 2 =\n[assistant] ")
    with pytest.raises(DataError, match=r"prompt 1.* must be a non-empty list of messages"):
        inference.sample_prompts(config, registry, [[{"rule": "user"}]], **count)


TURN = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hello", ["Hello"]),
        (["a", "b"], ["a", "b"]),
        ((), []),
        ([TURN], [[TURN]]),
        (TURN, [[TURN]]),
        ([[TURN], [TURN, TURN]], [[TURN], [TURN, TURN]]),
        (({"role": "user"},), [[{"role": "user"}]]),
    ],
)
def test_prompts_are_texts_or_conversations(prompts: Any, expected: list[Any]) -> None:
    found = given_prompts(prompts)
    assert [one if isinstance(one, str) else list(one) for one in found] == expected


@pytest.mark.parametrize("prompts", [3, ["a", 3], [[]], [TURN, "a"], None])
def test_other_prompts_are_refused_with_what_is_expected(prompts: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompts: .*expected a text or a list of texts, or else messages"):
        given_prompts(prompts)


def test_texts_and_conversations_in_one_call_are_named_and_counted() -> None:
    talk = [{"role": "user", "content": "b"}]
    with pytest.raises(ConfigError, match=r"prompts: 2 texts and 1 conversation: expected one kind"):
        given_prompts(["a", talk, "c"])


def test_the_best_checkpoint_is_taken_by_name(model: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 9)
    for step in (2, 4):
        best = BestRecord(step=2, metric="eval/accuracy_greedy", mode="max", value=0.5) if step == 2 else None
        with store.write(step, {}, best=best) as draft:
            (draft / "model").mkdir()
            (draft / "model" / "config.json").write_text("{}")
    assert find_model(tmp_path).model.parent.name == "step_00000004"
    assert find_model(tmp_path, checkpoint="best").model.parent.name == "step_00000002"
    assert find_model(tmp_path, checkpoint="2").model.parent.name == "step_00000002"
    with pytest.raises(ConfigError, match=r"--checkpoint 'bset': expected 'best', .* has checkpoints of steps 2, 4"):
        find_model(tmp_path, checkpoint="bset")
    store.mark_best(None)
    with pytest.raises(ConfigError, match=r"no best checkpoint is recorded there: set checkpoint\.best\.metric"):
        find_model(tmp_path, checkpoint="best")


def test_a_configuration_that_measures_nothing_is_refused(model: Path) -> None:
    """It printed 0.0 and NaN."""
    with pytest.raises(ConfigError, match="leaves nothing to measure"):
        run_eval(model, "--eval.greedy", "false", "--eval.samples_per_prompt", "0")


def test_load_config_reads_back_what_it_wrote(model: Path, tmp_path: Path) -> None:
    from rlsdk.config import dump_config

    flags = ["--eval.sets.x.samples_per_prompt", "4", "--eval.sets.x.rewards", '[{"name": "gsm8k"}]']
    config = load_config([], ["--model", str(model), *arguments(*flags)])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "config.yaml"]) == config
