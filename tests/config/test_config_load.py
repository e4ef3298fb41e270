"""Files and flags: what wins, how text becomes a value, and one message for all that is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.config import RunConfig, dump_config, load_config
from rlsdk.config.loading.load import PACKAGE
from rlsdk.interfaces import ConfigError
from rlsdk.registry import Registry

QUICKSTART = PACKAGE / "trainer" / "recipes" / "quickstart.yaml"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def lines_of(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [line.strip() for line in str(error.value).splitlines()]


def test_without_anything_the_defaults_stand(registry: Registry) -> None:
    assert load_config(registry=registry) == RunConfig()


def test_later_files_win_and_flags_win_over_files(tmp_path: Path, registry: Registry) -> None:
    first = write(tmp_path, "trainer: {steps: 1, seed: 1}\nrewards: [{name: a}, {name: b}]\n", "1.yaml")
    second = write(tmp_path, "trainer: {steps: 2}\nrewards: [{name: c}]\n", "2.yaml")
    config = load_config([first], ["--trainer.steps", "3", "--config", str(second)], registry)
    assert (config.trainer.steps, config.trainer.seed) == (3, 1)
    assert [reward.name for reward in config.rewards] == ["c"]


def test_flags_are_spelt_in_several_ways(registry: Registry) -> None:
    flags = ["--trainer.steps=7", "--trainer.save-every-steps", "5", "--train.activation_checkpointing"]
    flags += ["--data.shuffle", "false", "--algorithm.entropy_coef", "-0.1", "--train.optim.lr", "3e-4"]
    config = load_config([], flags, registry)
    assert (config.trainer.steps, config.trainer.save_every_steps) == (7, 5)
    assert config.train.activation_checkpointing
    assert not config.data.shuffle
    assert config.algorithm.entropy_coef == -0.1
    assert config.train.optim.lr == 3e-4


def test_short_flags_name_their_fields(registry: Registry) -> None:
    flags = ["--model", "org/m", "--data", "a.jsonl", "--steps", "9", "--seed", "4", "--rollout-backend", "calm"]
    config = load_config([], [*flags, "--reward", "gsm8k", "--reward", "file.py:fn"], registry)
    assert (config.model.path, config.data.train, config.trainer.steps, config.trainer.seed) == (
        "org/m",
        "a.jsonl",
        9,
        4,
    )
    assert [reward.name for reward in config.rewards] == ["gsm8k", "file.py:fn"]
    assert config.rollout.backend == "calm"


def test_reward_flags_replace_the_rewards_of_the_files(tmp_path: Path, registry: Registry) -> None:
    path = write(tmp_path, "rewards: [{name: a}, {name: b}]\n")
    config = load_config([path], ["--reward", "c", "--rewards.0.weight", "2.5"], registry)
    assert [(reward.name, reward.weight) for reward in config.rewards] == [("c", 2.5)]


@pytest.mark.parametrize(
    "text", ["007", "1e-3", "true", "null and void", "{prompt} #1", "a: b", "[x", "'quoted'", "~x"]
)
def test_a_text_field_takes_the_text_as_it_was_typed(text: str, registry: Registry) -> None:
    assert load_config([], ["--trainer.run_name", text], registry).trainer.run_name == text
    assert load_config([], [f"--data.prompt_template={text}"], registry).data.prompt_template == text


def test_null_clears_a_field_that_may_be_empty(registry: Registry) -> None:
    config = load_config([], ["--trainer.run_name", "null", "--train.optim.max_grad_norm", "null"], registry)
    assert (config.trainer.run_name, config.train.optim.max_grad_norm) == (None, None)


def test_lists_and_mappings_are_yaml_and_one_item_may_stand_alone(registry: Registry) -> None:
    flags = [
        "--rollout.stop_strings",
        '["</s>", "1"]',
        "--tracking.trackers",
        "jsonl",
        "--train.optim.betas",
        "[0, 0.9]",
    ]
    flags += ["--data.options", "{min_terms: 2, words: [a]}", "--data.options.max_terms", "3"]
    config = load_config([], flags, registry)
    assert config.rollout.stop_strings == ("</s>", "1")
    assert config.tracking.trackers == ("jsonl",)
    assert config.train.optim.betas == (0.0, 0.9)
    assert config.data.options == {"min_terms": 2, "words": ["a"], "max_terms": 3}


def test_items_of_a_list_are_set_by_position(tmp_path: Path, registry: Registry) -> None:
    path = write(tmp_path, "rewards: [{name: a}, {name: b}]\n")
    config = load_config([path], ["--rewards.1.options.k", "5"], registry)
    assert config.rewards[1].options == {"k": 5}
    with pytest.raises(ConfigError, match=r"rewards: has no item 2 \(--rewards\.2\.weight\)"):
        load_config([path], ["--rewards.2.weight", "1"], registry)


def test_pools_are_written_by_name(registry: Registry) -> None:
    flags = ["--placement.pools.a.devices_per_node", "[4]", "--placement.roles", "{actor: a, rollout: a}"]
    assert load_config([], flags, registry).placement.pools["a"].devices_per_node == (4,)


def test_every_problem_is_listed_with_path_value_expectation_nearest_name_and_origin(
    tmp_path: Path, registry: Registry
) -> None:
    path = write(
        tmp_path,
        "train:\n  optim: {lr: fast, schedule: cosin}\nrewards:\n  - {name: gsm8k, wieght: 2}\n"
        "trainer:\n  stepz: 5\n  seed: -1\nrollout: {temperature: 0}\nplacement: 5\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config([path], ["--eval.greedy", "maybe", "--foo", "--train.micro_batch_rows", "0"], registry)
    found = lines_of(caught)
    assert found[0] == "10 problems in the configuration:"
    assert f"train.optim.lr: 'fast': expected a number ({path}:2)" in found
    assert (
        "train.optim.schedule: 'cosin': expected one of 'constant', 'linear' or 'cosine'; did you mean 'cosine'? "
        f"({path}:2)" in found
    )
    assert f"rewards.0.wieght: unknown key; did you mean 'weight'? ({path}:4)" in found
    assert f"trainer.stepz: unknown key; did you mean 'steps'? ({path}:6)" in found
    assert f"trainer.seed: -1: expected at least 0 ({path}:7)" in found
    assert f"rollout.temperature: 0: expected more than 0.0 ({path}:8)" in found
    (placement,) = (line for line in found if line.startswith("placement: 5: expected a mapping with the keys "))
    assert "device" in placement
    assert placement.endswith(f"({path}:9)")
    assert "eval.greedy: 'maybe': expected true or false (--eval.greedy)" in found
    assert "train.micro_batch_rows: 0: expected more than 0 (--train.micro_batch_rows)" in found
    assert any(
        line.startswith("foo: unknown key; expected one of algorithm, checkpoint, critic, data") for line in found
    )


def test_a_combination_across_fields_names_its_path_and_origin(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.samples_per_prompt: 1: .*\(--trainer\.samples_per_prompt\)$"):
        load_config([], ["--trainer.samples_per_prompt", "1"], registry)


def test_a_flag_below_a_value_says_so(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"trainer: 5 has no field 'steps' \(--trainer\.steps\)"):
        load_config([], ["--trainer", "5", "--trainer.steps", "5"], registry)


@pytest.mark.parametrize("arguments", [["train"], ["-x"], ["--"], ["--config"]])
def test_an_argument_that_is_no_flag_is_refused(arguments: list[str], registry: Registry) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        load_config([], arguments, registry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {steps: 1", r":1: .*expected YAML"),
        ("trainer:\n  steps: 1\n  steps: 2\n", r":3: duplicate key 'steps'"),
        ("5: 1", r":1: key '5': expected a text"),
        ("- a", "expected a mapping of sections"),
        ("model: {path: !!python/object/apply:os.system ['true']}", "expected plain data"),
        ("a: &x [*x]", "contains itself"),
        ("model: {path: \x00}", "expected YAML"),
    ],
)
def test_a_file_that_is_no_plain_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str, registry: Registry
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        load_config([path], [], registry)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config([tmp_path / "missing.yaml"], [], registry)


@contextmanager
def piped(text: str) -> Iterator[str]:
    """The path of a pipe as a shell makes it for `<(command)`."""
    reader, writer = os.pipe()
    try:
        os.write(writer, text.encode())
        os.close(writer)
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)


def test_a_pipe_named_on_the_command_line_is_read_once(tmp_path: Path, registry: Registry) -> None:
    with piped("algorithm: {recipe: dapo}\ntrainer: {steps: 7}\n") as pipe:  # a recipe needs the files a second time
        config = load_config([], ["--config", pipe, "--seed", "3"], registry)
    assert (config.trainer.steps, config.trainer.seed, config.algorithm.recipe) == (7, 3, "dapo")
    with piped("trainer:\n  steps: none\n") as pipe, pytest.raises(ConfigError, match=f"trainer.steps.*{pipe}:2"):
        load_config([], ["--config", pipe], registry)
    with piped("") as pipe, pytest.raises(ConfigError, match="cannot be read: is a pipe that ended without any text"):
        load_config([], ["--config", pipe], registry)


def test_a_pipe_that_a_folder_holds_is_refused(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "config.yaml")
    for files, flags in (([tmp_path / "config.yaml"], []), ([], ["--config", str(tmp_path / "config.yaml")])):
        with pytest.raises(ConfigError, match="is a named pipe, expected a regular file"):
            load_config(files, flags, registry)


def test_an_empty_file_changes_nothing(tmp_path: Path, registry: Registry) -> None:
    assert load_config([write(tmp_path, "# nothing\n")], [], registry) == RunConfig()


def test_nothing_is_expanded_or_evaluated(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    path = write(tmp_path, "data: {prompt_template: '${prompt} $SECRET {prompt}', system_prompt: '${SECRET}'}\n")
    config = load_config([path], ["--data", "~/x.jsonl", "--trainer.run_dir", "%(x)s"], registry)
    texts = (config.data.prompt_template, config.data.system_prompt, config.data.train, config.trainer.run_dir)
    assert texts == ("${prompt} $SECRET {prompt}", "${SECRET}", "~/x.jsonl", "%(x)s")
    with pytest.raises(ConfigError, match=r"'2 \*\* 3': expected a whole number"):
        load_config([], ["--steps", "2 ** 3"], registry)


def test_a_variable_in_a_path_or_a_number_is_refused_with_what_to_type(tmp_path: Path, registry: Registry) -> None:
    path = write(tmp_path, "model: {path: $MODEL}\ntrainer:\n  run_dir: ${HOME}/runs\n  steps: ${STEPS}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path], ["--reward", "${HERE}/r.py:fn"], registry)
    said = str(caught.value)
    assert said.startswith("4 problems")
    assert "trainer.steps: '${STEPS}': expected a whole number; environment variables are not replaced" in said
    assert f'let the shell do it: --trainer.run_dir "${{HOME}}/runs" ({path}:3)' in said
    assert "model.path: '$MODEL': environment" in said
    assert "rewards.0.name: '${HERE}/r.py:fn': environment" in said


def test_what_a_recipe_sets_is_called_its_default_and_comes_last(registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            [QUICKSTART],
            ["--steps", "2", "--rollout-backend", "vlm"],
            registry,
        )
    _, first, second = str(caught.value).splitlines()
    assert first.endswith("(--rollout-backend)")
    assert second.startswith("  train.optim.warmup_steps: 20")
    assert second.endswith("(the default of quickstart)")


def test_a_missing_backend_answers_like_the_registry_and_does_not_hide_other_problems(registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["--train-backend", "turob", "--steps", "x"], registry)
    assert "did you mean 'turbo'" in str(caught.value)
    assert "trainer.steps: 'x'" in str(caught.value)


SCALARS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["1e-6", "null", "~", "yes", "no", "2024-01-01", "0x1f", "010", "1:30", "", " ", "- a", "#x", "=", "<<"]
    ),
)
VALUES = st.recursive(
    st.one_of(
        SCALARS,
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.none(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(SCALARS, inner, max_size=3)),
    max_leaves=6,
)


@settings(deadline=None)
@given(name=SCALARS, template=SCALARS, options=st.dictionaries(SCALARS, VALUES, max_size=4), lr=st.floats(1e-30, 1e30))
def test_what_is_dumped_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, registry: Registry, name: str, template: str, options: object, lr: float
) -> None:
    raw = {
        "trainer": {"run_name": name},
        "data": {"prompt_template": template, "options": options},
        "train": {"optim": {"lr": lr}},
    }
    config = RunConfig.model_validate(raw)
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config([path], [], registry) == config
