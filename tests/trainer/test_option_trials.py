"""Options that a registered function refuses are refused before a run; functions are tried with their defaults, too."""

from __future__ import annotations

import pytest

from rlsdk.config import RunConfig, load_config
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.inputs.option_trials import _batch, _inputs, refused_options


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def read(registry: Registry, *flags: str) -> RunConfig:
    return load_config([], list(flags), registry)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algorithm.loss_options", "{dual_clip: 0.5}"], "algorithm.loss_options.dual_clip: dual_clip is 0.5"),
        (
            ["--algorithm.loss", "gspo", "--algorithm.loss_options", "{clip_low: 2.0}"],
            "clip_low: clip_low is 2.0",
        ),
        (["--algorithm.loss", "sapo", "--algorithm.loss_options", "{tau_negative: -1.0}"], "tau_negative is -1.0"),
        (["--algorithm.advantage_options", "{scale: grup}"], "did you mean 'group'"),
        (["--algorithm.advantage_options", "{eps: -1.0}"], "algorithm.advantage_options.eps: eps is -1.0"),
        (["--algorithm.advantage", "gae", "--algorithm.advantage_options", "{lam: 1.5}"], "lam is 1.5"),
        (["--rewards", "[{name: language, options: {scripts: [ENGLISH]}}]"], "rewards.0.options.scripts: scripts has"),
        (["--rewards", "[{name: format, options: {tags: []}}]"], "rewards.0.options.tags: tags is empty"),
        (["--rewards", "[{name: fuzzy, options: {threshold: 2.0}}]"], "threshold is 2.0"),
        (["--rewards", "[{name: code, options: {timeout_s: 0.0}}]"], "timeout_s is 0.0"),
        (["--rewards", "[{name: json_schema, options: {schema: {type: no}}}]"], "schema is not a JSON schema"),
        (
            ["--eval.sets", "{a: {rewards: [{name: format, options: {tags: []}}]}}"],
            "eval.sets.a.rewards.0.options",
        ),
    ],
)
def test_a_value_outside_of_its_range_is_refused_by_its_field(flags: list[str], said: str, registry: Registry) -> None:
    (problem,) = refused_options(read(registry, *flags), registry)
    assert said in str(problem)


def test_good_options_and_functions_of_files_are_not_refused(registry: Registry) -> None:
    good = [
        "--algorithm.loss_options",
        "{clip_low: 0.1, dual_clip: 3.0}",
        "--algorithm.advantage_options",
        "{eps: 0.0}",
    ]
    good += ["--rewards", "[{name: language, options: {min_share: 0.5}}, {name: exact, options: {field: other}}]"]
    assert list(refused_options(read(registry, *good), registry)) == []
    own = ["--algorithm.loss", "nowhere.py:fn", "--algorithm.loss_options", "{a: 1}"]
    assert list(refused_options(read(registry, *own), registry)) == []


@pytest.mark.parametrize("kind", [ComponentKind.LOSS, ComponentKind.ADVANTAGE])
def test_every_function_can_be_called_on_the_rows_of_a_trial(kind: ComponentKind, registry: Registry) -> None:
    """A trial that fails because of its rows would find nothing wrong with any option."""
    tried = 0
    for name in registry.usable(kind):
        function = registry.component(kind, name)
        function(_inputs() if kind is ComponentKind.LOSS else _batch())
        tried += 1
    assert tried > 4


def test_a_best_sample_of_a_group_has_a_finite_advantage_without_eps(registry: Registry) -> None:
    found = registry.component(ComponentKind.ADVANTAGE, "grpo_passk")(_batch(), eps=0.0)
    assert bool(found["advantages"].isfinite().all())
