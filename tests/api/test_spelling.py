"""What a call from Python reads: its own arguments and rows, no temporary file and no flag of the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, DataError, RewardSample, RlsdkError
from rlsdk.interfaces.spelling import (
    PythonCall,
    Setting,
    as_given,
    called,
    number_of,
    row_of,
    source_of,
    spell,
    spelled_for,
    under,
)
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
from rlsdk.testing.process.models import write_tiny_model

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]


def score(sample: rlsdk.RewardSample) -> float:
    return 1.0


score.__module__ = "__main__"  # as in a script, so that its source is written to a file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_position_embeddings=4096)
    return folder


@pytest.mark.parametrize(
    ("setting", "flag", "keyword"),
    [
        (Setting("data.num_eval_rows", 2), "--data.num_eval_rows 2", "data__num_eval_rows=2"),
        (Setting("data.eval", "FILE"), "--data.eval FILE", "eval_data='FILE'"),
        (Setting("schedule.uncorrected", True), "--schedule.uncorrected true", "schedule={'uncorrected': True}"),
        (Setting("trainer.steps", 200), "--trainer.steps 200", "steps=200"),
        (Setting("sft.steps", "N"), "--sft.steps N", "sft={'steps': 'N'}"),
        (Setting("model.path", "FOLDER"), "--model FOLDER", "model='FOLDER'"),
        (Setting("rewards", "NAME"), "--reward NAME", "reward='NAME'"),
        (Setting("algorithm.loss", "ppo_clip"), "--algorithm.loss ppo_clip", "algorithm__loss='ppo_clip'"),
        (
            Setting("placement.devices", {"rollout": 2}),
            "--placement.devices '{rollout: 2}'",
            "placement={'devices': {'rollout': 2}}",
        ),
        (Setting("train.optim.lr", 1e-6), "--train.optim.lr 1e-6", "train={'optim': {'lr': 1e-06}}"),
        (Setting("train.optim.betas", [0.9, 0.95]), "--train.optim.betas '[0.9, 0.95]'",
         "train={'optim': {'betas': [0.9, 0.95]}}"),
        (Setting("rollout.max_model_tokens", None), "--rollout.max_model_tokens null",
         "rollout={'max_model_tokens': None}"),
        (Setting("trainer.resume", "never"), "--trainer.resume never", "trainer={'resume': 'never'}"),
        (Setting("trainer.run_name"), "--trainer.run_name", "run_name"),
        (Setting("train.backend", "torch"), "--train-backend torch", "train={'backend': 'torch'}"),
        (Setting("trust_run", True), "--trust-run", "trust_run=True"),
        (Setting("model.path"), "--model", "model"),
        (Setting("algorithm.kl_estimator"), "--algorithm.kl_estimator", "algorithm.kl_estimator"),
    ],
)  # fmt: skip
def test_a_setting_is_a_flag_or_a_keyword(setting: Setting, flag: str, keyword: str) -> None:
    assert str(setting) == setting.as_flag() == flag
    with spelled_for(PythonCall()):
        assert str(setting) == setting.as_keyword() == keyword
    assert str(setting) == flag


@pytest.mark.parametrize(
    ("make", "flags", "keywords"),
    [
        (lambda: spell(Setting("data.max_prompt_tokens", 4), Setting("rollout.max_response_tokens", 8)),
         "--data.max_prompt_tokens 4 --rollout.max_response_tokens 8",
         "data__max_prompt_tokens=4, rollout={'max_response_tokens': 8}"),
        (lambda: as_given("set", "gredy"), "--set 'gredy'", "sets='gredy'"),
        (lambda: as_given("checkpoint", "7"), "--checkpoint '7'", "checkpoint='7'"),
        (lambda: number_of("prompt", 2), "--prompt 2", "prompts[1]"),
        (lambda: row_of("/tmp/train-0.jsonl", 3), "/tmp/train-0.jsonl:3", "row 3 of data"),
        (lambda: source_of(row_of("/tmp/train-0.jsonl", 3)), "/tmp/train-0.jsonl", "data"),
        (lambda: row_of("b.jsonl", 3), "b.jsonl:3", "b.jsonl:3"),
        (lambda: source_of("b.jsonl:3"), "b.jsonl", "b.jsonl"),
        (lambda: called("/tmp/own_1.py:score"), "/tmp/own_1.py:score", "score"),
        (lambda: under("data.train", "/tmp/train-0.jsonl"), "data.train: ", ""),
        (lambda: under("data.train", "b.jsonl"), "data.train: ", "data.train: "),
    ],
)  # fmt: skip
def test_arguments_and_rows_are_called_as_they_were_given(make: Callable[[], str], flags: str, keywords: str) -> None:
    assert make() == flags
    with spelled_for(PythonCall(names={"/tmp/train-0.jsonl": "data", "/tmp/own_1.py:score": "score"})):
        assert make() == keywords


def test_calls_beside_each_other_end_in_any_order() -> None:
    first, second = spelled_for(PythonCall(eval_data="one")), spelled_for(PythonCall(eval_data="two"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert str(Setting("data.eval", "FILE")) == "two='FILE'"
    second.__exit__(None, None, None)
    assert str(Setting("data.eval", "FILE")) == "--data.eval FILE"


@pytest.mark.parametrize(
    ("reader", "said"),
    [(nullcontext(), "`--data.answer_field FIELD`"), (spelled_for(PythonCall()), "`data__answer_field='FIELD'`")],
    ids=["command line", "call"],
)
def test_messages_of_grading_processes_are_for_the_same_reader(reader: AbstractContextManager[None], said: str) -> None:
    sample = RewardSample(prompt="1+1=", response="2", answer=None, row={}, truncated=False)
    definition = RewardDef(name="gsm8k", target="rlsdk.rewards.math.graders:gsm8k")
    with reader, closing(RewardRunner([definition], RewardLimits(), num_workers=1)) as runner:
        (example,) = runner.score([sample]).examples
    assert said in example.message


def test_rows_of_an_evaluation_have_the_name_of_its_argument() -> None:
    with spelled_for(PythonCall(eval_data="data")):
        assert str(Setting("data.eval", "FILE")) == "data='FILE'"


def test_fields_are_given_so_that_they_reach_their_section() -> None:
    """`data=` is the rows and `model=` the folder: their fields are keywords of their own."""
    with pytest.raises(ConfigError, match=r"write data__max_prompt_tokens=5"):
        rlsdk.plan(max_prompt_tokens=5)


def test_names_of_other_trainers_are_known() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer=\{'prompts_per_step': 4\}\?"):
        rlsdk.plan(batch_size=4)
    with pytest.raises(ConfigError, match=r"did you mean train=\{'optim': \{'lr': 0.1\}\} or "):
        rlsdk.plan(learning_rate=0.1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rlsdk.sft(learning_rate=0.1), r"did you mean sft=\{'lr': 0.1\}\?"),
        (lambda: rlsdk.dpo(beta=0.1), r"did you mean preferences=\{'beta': 0.1\}\?"),
        (lambda: rlsdk.sft(reward="gsm8k"), "reward: has no effect on `rlsdk sft`"),
        (lambda: rlsdk.sft("m", "d", algorithm="grpo"), "algorithm: has no effect on `rlsdk sft`"),
        (lambda: rlsdk.dpo("m", "d", train={"optim": {"lr": 0.1}}), r"`preferences=\{'lr': 0.1\}` \(the call\)"),
        (lambda: rlsdk.plan("m", "d", critic={"warmup_steps": 2}), "needs no critic"),
    ],
    ids=["learning_rate", "beta", "reward", "algorithm", "train.optim.lr", "critic"],
)
def test_a_keyword_without_effect_is_refused_and_names_one_that_acts(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_function_that_cannot_be_sent_is_called_by_its_kind() -> None:
    with pytest.raises(ConfigError, match="reward: a lambda; expected a function written with `def`"):
        rlsdk.plan(reward=lambda sample: 1.0)


CASES: list[tuple[dict[str, Any], type[RlsdkError], str]] = [
    ({"data": [*ROWS[:2], {"answer": "1"}, *ROWS]}, DataError, r"^row 3 of data: row has no field 'question'"),
    ({"data": [*ROWS[:4], {"question": 7}]}, DataError, r"^row 5 of data: prompt field 'question' must be a text"),
    (
        {"data": ROWS, "data.num_eval_rows": 20},
        DataError,
        r"^data: cannot hold out 20 .*`data__num_eval_rows=2`.*`eval_data='FILE'`",
    ),
    ({"data": [*ROWS, object()]}, DataError, r"^row 21 of data: expected an object with named fields"),
    ({"data": ROWS, "eval_data": [3]}, DataError, r"^row 1 of eval_data: expected an object"),
    (
        {"data": [{**row, "answer": "none"} for row in ROWS], "reward": "choice", "data.num_eval_rows": 2},
        ConfigError,
        r"the first, row 1 of data: ",
    ),
    ({"data": ROWS, "reward": {"name": score, "options": {"scal": 2}}}, ConfigError, r"reward 'score' has no option"),
    ({"data": ROWS, "config": "nowhere.yaml"}, ConfigError, r"^config='nowhere.yaml': no such file"),
]


@pytest.mark.parametrize(("given", "kind", "said"), CASES, ids=[case[2][:24] for case in CASES])
def test_errors_name_rows_and_arguments(
    given: dict[str, Any], kind: type[RlsdkError], said: str, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as raised:
        rlsdk.train(model, **{"reward": score, **given})
    error: BaseException | None = raised.value
    text = str(error)
    assert re.search(said, text), text
    while error is not None:
        assert "rlsdk-given-" not in str(error)
        assert not re.search(r"--[a-z]+[. ]", str(error)), str(error)
        error = error.__cause__
    assert list(tmp_path.iterdir()) == []


def test_notices_before_the_run_has_a_folder_name_rows_too(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    class Heard(rlsdk.Quiet):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def notice(self, text: str) -> None:
            self.texts.append(text)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("no cluster today")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsdk.trainer.roles.devices.start_cluster", refuse)
    monkeypatch.setattr("rlsdk.trainer.runs.start.start_cluster", refuse)
    rows = [{"question": str(n), "answer": "A" if n else "none"} for n in range(20)]
    heard = Heard()
    with pytest.raises(ConfigError, match="no cluster today"):
        rlsdk.train(model, rows, "choice", view=heard, data__num_eval_rows=2)
    said = [text for text in heard.texts if "cannot be graded" in text]
    assert said
    assert "the first, row 1 of data: " in said[0]


def test_rows_of_an_evaluation_are_called_data(model: Path) -> None:
    with pytest.raises(DataError, match="row 1 of data: field 'question': holds a bytes"):
        rlsdk.evaluate(model, [{"question": b""}], score)
    with pytest.raises(DataError, match=r"^row 2 of data: row has no field 'question'"):
        rlsdk.generate(model, data=[ROWS[0], {"answer": "1"}])
    with pytest.raises(ConfigError, match="prompts: 5: expected a text or a list of texts"):
        rlsdk.generate(model, 5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^row 1 of data: row has no field 'answer' \(answer_field; no row has it\)"):
        rlsdk.sft(model, [{"question": str(n)} for n in range(20)], steps=1, data__num_eval_rows=2)
    with pytest.raises(ConfigError, match=r"give prompts='TEXT' \(repeatable\) or data='SOURCE'"):
        rlsdk.generate(model)


TYPED = ("cli/", "chaos/", "api/inference.py", "api/machine.py", "api/settings.py",
         "config/loading/overrides.py", "testing/process/callers.py")  # fmt: skip
"""Below `rlsdk`: what reads or makes a command line."""


def test_no_message_writes_a_field_out_as_a_flag() -> None:
    """A `Setting` is spelled for its reader; a whole command, `rlsdk train --trainer.steps 5`, is one for everybody."""
    flag = re.compile(rf"(?<!rlsdk )--(?:{'|'.join(RunConfig.model_fields)})\.\w")
    root = Path(rlsdk.__file__).parent
    found = []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
        docstrings = {id(value) for value in documented if isinstance(value, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = re.sub(r"rlsdk [a-z-]+ .*", "", node.value)
                if flag.search(text) and not str(file.relative_to(root)).startswith(TYPED):
                    found.append(f"{file.relative_to(root)}:{node.lineno}: {node.value!r}")
    assert found == []
