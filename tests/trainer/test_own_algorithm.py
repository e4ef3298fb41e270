"""Algorithms as objects: one in a file, one of a plugin, and what an algorithm or an estimator declares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_loop import Recorder, config_of, model, registry, trainer_of

from rlsdk.config import check_run, needed_roles
from rlsdk.config.checks.declared import with_declared_roles
from rlsdk.config.sections.role_kinds import filled_by
from rlsdk.interfaces import Algorithm, Batch, ConfigError, DataError, Models, Update, hookimpl, reads, reads_of
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.learner.algorithm import build_algorithm
from rlsdk.trainer.learner.mini_batches import rows_in_turn
from rlsdk.trainer.learner.policy_gradient import PolicyGradient

__all__ = ["model", "registry"]

BEST_OF_N = Path(__file__).parents[2] / "examples" / "best_of_n.py"


def test_an_algorithm_of_a_file_learns_from_the_best_of_each_group(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(model, registry, 3, "--algorithm.name", f"{BEST_OF_N}:BestOfN", "--train.optim.lr", "1e-2")
    assert check_run(config, registry) == []
    assert needed_roles(config) == ("actor", "rollout")
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "best", view) as (trainer, stage, _):
        trainer.fit()
    chosen = [step["best_of_n/rows"] for step in view.steps]
    assert 0 < max(chosen) <= 4
    assert stage.state.policy_version == sum(count > 0 for count in chosen)
    learned = next(step for step in view.steps if step["best_of_n/rows"])
    assert learned["policy/nll"] > 0
    assert learned["policy/sft_loss"] == pytest.approx(learned["policy/loss"])


class Weighed(PolicyGradient):
    """The policy gradient, on groups of at least one right sample, with a count that it remembers."""

    roles = ("ref",)
    seen = 0

    def accepts(self, scores: object) -> bool:
        return True

    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, dict[str, float]]:
        batch, metrics = super().prepare(batch, models)
        self.seen += batch.num_rows
        return batch, {**metrics, "own/ref_mean": float(batch["ref_log_probs"].mean())}

    def state_dict(self) -> dict[str, float]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, float]) -> None:  # type: ignore[override]
        super().load_state_dict(state)
        self.seen = int(state["seen"])


class Plugin:
    @hookimpl
    def rlsdk_register_algorithms(self, register: object) -> None:
        register("weighed", Weighed, "For the test.")  # type: ignore[operator]


def test_an_algorithm_of_a_plugin_brings_its_roles_and_its_state(model: str, tmp_path: Path) -> None:
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    registry.register_module(Plugin())
    assert "weighed" in registry.usable(ComponentKind.ALGORITHM)
    config = with_declared_roles(config_of(model, registry, 2, "--algorithm.name", "weighed"), registry)
    assert needed_roles(config) == ("actor", "rollout", "ref")
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "own", view) as (trainer, stage, _):
        trainer.fit()
        assert stage.state_dict()["algorithm"] == {"kl_coef": 0.0, "seen": 32}
    assert all(step["own/ref_mean"] < 0 for step in view.steps)
    with trainer_of(config, registry, tmp_path / "own", Recorder()) as (trainer, stage, _):
        trainer.restore(tmp_path / "own" / "checkpoints" / "step_00000002")
        assert stage.learner.algorithm.seen == 32  # type: ignore[attr-defined]


@reads("values")
def needs_values(batch: Batch) -> Batch:
    """An estimator of a user's own that reads a critic."""
    return batch.with_tokens(advantages=(batch["values"] * 0 + 1) * batch["response_mask"], returns=batch["values"])


def test_an_estimator_that_reads_values_gets_a_critic(model: str, registry: Registry, tmp_path: Path) -> None:
    own = config_of(model, registry, 1, "--algorithm.advantage", f"{__file__}:needs_values")
    assert needed_roles(own) == ("actor", "rollout")
    config = with_declared_roles(own, registry)
    assert needed_roles(config) == ("actor", "rollout", "critic")
    view = Recorder()
    with trainer_of(config, registry, tmp_path / "critic", view) as (trainer, _, _):
        trainer.fit()
    assert "critic/loss" in view.steps[0]
    # Nothing is filled in where the fields of the configuration say it already.
    built_in = config_of(model, registry, 1, "--algorithm.advantage", "gae")
    assert with_declared_roles(built_in, registry) is built_in


def test_the_fields_of_the_configuration_know_what_rlsdk_s_own_functions_need(model: str, registry: Registry) -> None:
    """So that a command need not import them, and torch, before it is refused."""
    for kind, flag in ((ComponentKind.ADVANTAGE, "--algorithm.advantage"), (ComponentKind.LOSS, "--algorithm.loss")):
        for name in registry.usable(kind):
            fields = reads_of(registry.function(kind, name)).fields
            wanted = {role for field in fields for role in filled_by(field)}
            assert wanted <= set(needed_roles(config_of(model, registry, 1, flag, name))), name


class Greedy(Algorithm):
    """Asks a model that the run does not have."""

    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, dict[str, float]]:
        return batch.with_tokens(values=models.forward("critik", batch, "values")), {}

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return batch, {}

    def updates(self, batch: Batch, *, step: int) -> list[Update]:
        return []


class Half(Algorithm):
    roles = ("judge",)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Half", "{}", "lacks ['advantages', 'prepare', 'updates']"),
        ("Half", "{}", "asks for the roles ['judge']"),
        ("needs_values", "{}", "expected a subclass of rlsdk.interfaces.Algorithm"),
        ("Absent", "{}", "no function 'Absent'"),
    ],
)
def test_what_is_no_algorithm_is_refused_before_anything_starts(
    model: str, registry: Registry, name: str, options: str, said: str
) -> None:
    config = config_of(model, registry, 1, "--algorithm.name", f"{__file__}:{name}", "--algorithm.options", options)
    found = [problem for problem in check_run(config, registry) if problem.path == "algorithm.name"]
    assert any(said in problem.message for problem in found), found


def test_options_belong_to_an_algorithm_of_ones_own(model: str, registry: Registry) -> None:
    config = config_of(model, registry, 1, "--algorithm.options", "{clip_low: 0.2}")
    assert [problem.path for problem in check_run(config, registry)] == ["algorithm.options"]


def test_a_role_that_the_run_lacks_is_named(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 1, "--algorithm.name", f"{__file__}:Greedy")
    with (
        trainer_of(config, registry, tmp_path / "greedy", Recorder()) as (trainer, _, _),
        pytest.raises(ConfigError, match=r"asks role 'critik'.*it has \['actor'\]"),
    ):
        trainer.fit()


def first_norm(model: str, registry: Registry, folder: Path, *extra: str) -> tuple[float, list[dict[str, float]]]:
    """Gradient norm of the first update of a run without any signal from rewards, and all metrics."""
    view = Recorder()
    config = config_of(model, registry, 4, *extra, "--trainer.updates_per_step", "1", reward="constant")
    with trainer_of(config, registry, folder, view) as (trainer, _, _):
        trainer.fit()
    return view.steps[0]["policy/grad_norm"], [dict(step) for step in view.steps]


def test_the_supervised_term_adds_its_gradient_to_the_same_optimizer_step(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """Without signal from rewards the gradient is that of the term alone: in proportion to its coefficient."""
    none, _ = first_norm(model, registry, tmp_path / "none")
    one, steps = first_norm(model, registry, tmp_path / "one", "--algorithm.ptx.coef", "0.01")
    two, _ = first_norm(model, registry, tmp_path / "two", "--algorithm.ptx.coef", "0.02")
    assert none == 0.0
    assert one > 0
    assert two == pytest.approx(2 * one, rel=1e-4)
    assert [step["policy/ptx_nll"] for step in steps] == sorted((s["policy/ptx_nll"] for s in steps), reverse=True)
    assert steps[0]["policy/ptx_loss"] == pytest.approx(0.01 * steps[0]["policy/ptx_nll"])
    assert steps[-1]["policy/version"] == 4


def test_the_supervised_term_may_have_data_of_its_own(model: str, registry: Registry, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{at}+1=", "answer": "{at + 1}"}}\n' for at in range(5)))
    extra = ["--algorithm.ptx.coef", "0.1", "--algorithm.ptx.source", str(rows), "--algorithm.ptx.rows_per_update", "3"]
    _, steps = first_norm(model, registry, tmp_path / "own", *extra)
    assert steps[0]["policy/ptx_nll"] > 0
    config = config_of(model, registry, 1, "--algorithm.ptx.coef", "0.1", "--rollout.max_response_tokens", "1")
    said = pytest.raises(DataError, match=r"algorithm.ptx: .*raise rollout.max_response_tokens 1")
    with said, trainer_of(config, registry, tmp_path / "long", Recorder()):
        pass


def test_rows_come_in_turn() -> None:
    drawn = [rows_in_turn(5, 3, number, seed=(0, "ptx")) for number in range(5)]
    every = [row for rows in drawn for row in rows]
    assert sorted(every) == sorted([*range(5)] * 3)
    assert sorted(every[:5]) == sorted(every[5:10]) == list(range(5))
    assert drawn[4] == rows_in_turn(5, 3, 4, seed=(0, "ptx"))


class Replacing(PolicyGradient):
    """Replaces groups, whatever the configuration says."""

    max_groups = 6  # type: ignore[assignment]


def test_an_own_algorithm_that_replaces_groups_is_refused_beside_a_reward_model(model: str, registry: Registry) -> None:
    own = ["--algorithm.name", f"{__file__}:Replacing"]
    build_algorithm(config_of(model, registry, 1, *own), registry)
    config = config_of(model, registry, 1, *own, "--reward_models", "[{path: models/judge}]")
    with pytest.raises(ConfigError, match=r"replaces groups by their scores, .* reward_models \['models/judge'\]"):
        build_algorithm(config, registry)
