"""Training and evaluation prompts of a run: from one source or a mixture, sharing no question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import RunConfig, load_config
from rlsdk.data import DataRow, PromptDataset, PromptFormat, PromptStream
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.kit.model.tokenizers import write_byte_tokenizer
from rlsdk.registry import Registry
from rlsdk.trainer.inputs.data import (
    first_prompts,
    load_prompts,
    with_pair_steps,
    with_sft_steps,
    with_steps,
)
from rlsdk.trainer.inputs.prompt_formats import hold_out
from rlsdk.trainer.inputs.sources import source_checks
from rlsdk.trainer.tracking.events import RunView


class Notices(RunView):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def source(folder: Path, name: str, size: int) -> str:
    rows = [json.dumps({"question": f"{name}{at}", "answer": "1"}) for at in range(size)]
    (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return str(folder / f"{name}.jsonl")


def config_of(*arguments: str) -> RunConfig:
    return load_config([], list(arguments))


def mixture(folder: Path, *more: str) -> RunConfig:
    parts = [
        {"source": source(folder, "a", 40), "weight": 3},
        {"source": source(folder, "b", 20), "weight": 1, "num_rows": 10},
        {"source": "reasoning_gym:chain_sum", "weight": 1, "num_rows": 7, "options": {"seed": 5}},
    ]
    return config_of("--data.mixture", json.dumps(parts), *more)


def loaded(config: RunConfig, registry: Registry, tokenizer: Any, view: RunView) -> tuple[PromptDataset, PromptDataset]:
    """Training prompts, and those that an evaluation samples."""
    found = load_prompts(config, registry, tokenizer, view, measures=config.eval.measures())
    assert found.sets["sampled"] is found.sets["greedy"]  # tokenized once
    return found.train, found.sets["greedy"]


def test_prompts_of_a_mixture_are_drawn_by_weight(tmp_path: Path, registry: Registry, tokenizer: Any) -> None:
    view = Notices()
    train, held = loaded(mixture(tmp_path, "--data.num_eval_rows", "9"), registry, tokenizer, view)
    assert len(held) == 9
    assert len(train) + len(held) == 40 + 10 + 7
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held}
    drawn = [prompt.source for prompt in PromptStream(train, seed=1).take(100)]
    assert sum("a.jsonl" in name for name in drawn) == 60
    assert sum("b.jsonl" in name for name in drawn) == 20
    assert any("a.jsonl (60.0%)" in line for line in view.lines)


def test_one_source_gives_what_it_always_gave(tmp_path: Path, registry: Registry, tokenizer: Any) -> None:
    config = config_of("--data.train", source(tmp_path, "a", 40), "--data.num_eval_rows", "9")
    train, held = loaded(config, registry, tokenizer, Notices())
    assert (len(train), len(held)) == (31, 9)
    assert [prompt.index for prompt in train] == list(range(31))
    assert train.report.num_rows == 31


def test_a_source_of_a_mixture_that_is_not_there_is_named_by_its_field(tmp_path: Path, registry: Registry) -> None:
    parts = [{"source": source(tmp_path, "a", 3)}, {"source": str(tmp_path / "aa.jsonl")}]
    with pytest.raises(DataError, match=r"data\.mixture\.1\.source: .*did you mean 'a\.jsonl'"):
        _ = [check() for check in source_checks(config_of("--data.mixture", json.dumps(parts)), registry)]


def test_a_source_that_evaluation_uses_up_is_named(tmp_path: Path, registry: Registry, tokenizer: Any) -> None:
    path = source(tmp_path, "a", 3)
    parts = json.dumps([{"source": path}, {"source": source(tmp_path, "b", 3)}])
    config = config_of("--data.mixture", parts, "--data.eval", path, "--data.num_eval_rows", "3")
    with pytest.raises(DataError, match=r"data\.mixture\.0: all 3 rows"):
        loaded(config, registry, tokenizer, Notices())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data.train", "x.jsonl"], "data.mixture: replaces data.train"),
        (["--data.num_train_rows", "5"], "data.num_train_rows: belongs to data.train"),
        (["--data.options", "{seed: 1}"], "data.options: belongs to data.train"),
        (["--data.num_eval_rows", "null"], "data.num_eval_rows: null needs data.eval"),
        (["--data.mixture.0.weight", "0"], r"data.mixture.0.weight: 0"),
        (["--data.mixture.0.wieght", "1"], "did you mean 'weight'"),
    ],
)
def test_settings_that_a_mixture_does_not_go_with_are_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of("--data.mixture", '[{"source": "a.jsonl"}]', *arguments)


@pytest.mark.parametrize(("epochs", "steps"), [("1", 4), ("2", 7), ("0.1", 1), ("0.3", 1), ("10", 34)])
def test_epochs_are_whole_steps_over_the_prompts_that_were_kept(epochs: str, steps: int) -> None:
    config = config_of("--trainer.epochs", epochs, "--trainer.prompts_per_step", "6")
    assert with_steps(config, 20).trainer.steps == steps
    assert with_steps(config, 20).trainer.optimizer_steps == steps


def test_a_schedule_that_the_epochs_are_too_short_for_is_refused_once_they_are_known() -> None:
    more = ["--train.optim.schedule", "cosine", "--train.optim.warmup_steps", "300"]
    config = config_of("--trainer.epochs", "1", "--trainer.prompts_per_step", "1", *more)
    assert with_steps(config, 301).trainer.steps == 301
    with pytest.raises(ConfigError, match=r"train\.optim\.warmup_steps: 300: expected fewer"):
        with_steps(config, 300)


def test_without_epochs_steps_count() -> None:
    config = config_of("--trainer.steps", "5")
    assert with_steps(config, 1000) is config


def test_epochs_of_supervised_training_and_of_pairs_count_their_own_rows() -> None:
    config = config_of("--sft.epochs", "2", "--sft.rows_per_step", "8", "--preferences.epochs", "0.5")
    assert with_sft_steps(config, 20).sft.steps == 5
    assert with_sft_steps(config, 20).sft.epochs is None
    assert with_pair_steps(config, 640).preferences.steps == 5
    late = config_of("--preferences.epochs", "1", "--preferences.schedule", "linear", "--preferences.warmup_steps", "9")
    assert with_pair_steps(late, 640).preferences.steps == 10
    with pytest.raises(ConfigError, match=r"preferences\.warmup_steps: 9: expected fewer than preferences\.steps 5"):
        with_pair_steps(late, 320)


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no-think>"
    "{% endif %}{% endif %}"
)


def test_chat_template_arguments_reach_every_prompt_and_a_set_may_have_others(
    tmp_path: Path, registry: Registry, tokenizer: Any
) -> None:
    from copy import deepcopy

    chat = deepcopy(tokenizer)
    chat.chat_template = CHAT
    sets = {"on": {"chat_template_kwargs": {"enable_thinking": True}, "system_prompt": ""}, "same": {}}
    config = config_of(
        "--data.train", source(tmp_path, "a", 40), "--data.num_eval_rows", "9", "--eval.sets", json.dumps(sets),
        "--data.chat_template_kwargs", "{enable_thinking: false}", "--data.system_prompt", "be brief",
    )  # fmt: skip
    found = load_prompts(config, registry, chat, Notices(), measures=config.eval.measures())
    assert all(p.text.startswith("[system]be brief[user]") and p.text.endswith("<no-think>") for p in found.train)
    assert all(p.text.endswith("<no-think>") for p in found.sets["same"])
    assert all(p.text.startswith("[user]a") and p.text.endswith("[assistant]") for p in found.sets["on"])
    assert [p.row for p in found.sets["on"]] == [p.row for p in found.sets["same"]]
    assert all(p.text.endswith("<no-think>") for p in first_prompts(config, registry, chat, 3))


def test_rows_of_a_set_are_kept_out_of_training(tmp_path: Path, registry: Registry, tokenizer: Any) -> None:
    """Also where the set names another field of its rows as the question."""
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"q": f"A{at} ", "answer": "1"}) for at in range(10)))
    sets = {"other": {"data": str(other), "prompt_field": "q", "num_rows": 4}, "held": {"num_rows": 2}}
    view = Notices()
    config = config_of(
        "--data.train", source(tmp_path, "a", 40), "--data.num_eval_rows", "5", "--eval.sets", json.dumps(sets)
    )
    found = load_prompts(config, registry, tokenizer, view, measures=config.eval.measures())
    trained = {prompt.text for prompt in found.train}
    assert not trained & {"a0", "a1", "a2", "a3"}
    assert [len(found.sets[name]) for name in ("other", "held")] == [4, 2]
    # All five that were held out stay out, though the set asks two of them only.
    held_out = [prompt.text for prompt in first_prompts(config, registry, tokenizer, 9)]
    assert len(held_out) == 5
    assert [prompt.text for prompt in found.sets["held"]] == held_out[:2]
    assert not trained & set(held_out)


@pytest.mark.parametrize(("count", "held"), [(2, 1), (40, 5), (256, 32), (257, 256)])
def test_the_default_number_of_held_out_rows_is_lowered_for_few_questions(
    count: int, held: int, tmp_path: Path
) -> None:
    rows = [DataRow(row={"question": f"q{n}"}, source=f"rows:{n}") for n in range(count)]
    found, said = hold_out(RunConfig(), rows, PromptFormat())
    assert len(found) == held
    assert said == ("" if held == 256 else f"data.num_eval_rows {held}: there are {count} questions")


def test_a_number_of_held_out_rows_that_was_set_is_never_lowered() -> None:
    rows = [DataRow(row={"question": f"q{n}"}, source=f"rows:{n}") for n in range(40)]
    with pytest.raises(DataError, match="cannot hold out 40"):
        hold_out(RunConfig.model_validate({"data": {"num_eval_rows": 40}}), rows, PromptFormat())
