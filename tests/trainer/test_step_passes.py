"""The forward passes that the learner makes, counted on real engines, are those that the planner counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import Recorder, config_of, model, session_of

from rlsdk.config import RunConfig, check_run, comparable_log_probs, needed_roles
from rlsdk.interfaces import BackendKind, Batch, ConfigError, LogProbKind, PolicyLossInputs, reads
from rlsdk.planning.calibration import planned_passes
from rlsdk.registry import Registry
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.roles.in_process import close_in_process
from rlsdk.testing.roles.in_process_group import InProcessGroup
from rlsdk.trainer.learner.algorithm import build_algorithm
from rlsdk.trainer.learner.learner import LearnerOptions, PolicyLearner
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.roles.session import Session

__all__ = ["model"]

VERSION = 7
KINDS = {"none": {}, "loss": {"kl_coef": 0.1}, "reward": {"kl_coef": 0.1, "kl_in_reward": True}}
CORRECTIONS = {"none": {}, "truncate": {"mode": "truncate"}, "reject": {"reject": "token"}}
COMBINATIONS = list(
    itertools.product(("auto", "always", "decoupled", "rollout"), CORRECTIONS, (0, 1, 2), (1, 2), (True, False))
)
"""Choice, correction, staleness, updates of a step, whether the engines' log-probs are of one distribution."""


@reads("entropy")
def needs_entropy(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    return -inputs.advantages * inputs.log_probs * inputs.batch["entropy"], {}


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The rollout engine's log-probs are those after top-p, as with some engines."""
    rows = Registry.discover({"RLSDK_PLUGINS": "rlsdk"}).rows()
    return Registry(
        replace(row, spec=replace(row.spec, log_prob_kind=LogProbKind.PROCESSED)) if row.name == "transformers" else row  # type: ignore[type-var]
        for row in rows
    )


@pytest.fixture(scope="module")
def base(model: str, registry: Registry) -> RunConfig:
    return config_of(model, registry, 1, "--algorithm.kl_coef", "0.1", "--algorithm.advantage", "gae")


@pytest.fixture(scope="module")
def session(base: RunConfig, registry: Registry) -> Iterator[Session]:
    made = session_of(base, registry)
    yield made
    close_in_process(made.roles.values())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Role and output of each forward pass that an engine made."""
    found: list[tuple[str, str]] = []
    call = InProcessGroup._call

    def counted(self: InProcessGroup, rank: int, spec: Any, method: str, *rest: Any) -> Any:
        if method == "forward":
            found.extend((self.role, output) for arguments in rest for output in _outputs(arguments))
        return call(self, rank, spec, method, *rest)

    monkeypatch.setattr(InProcessGroup, "_call", counted)
    return found


def _outputs(arguments: Any) -> list[str]:
    if isinstance(arguments, Mapping):
        return list(arguments)
    return [name for each in arguments for name in _outputs(each)] if isinstance(arguments, tuple | list) else []


def stale_batch(staleness: int) -> Batch:
    batch = random_batch(4, longest=8, seed=1)
    return batch.with_rows(
        uid=torch.tensor([0, 0, 1, 1]),
        policy_version=torch.tensor([VERSION, VERSION - staleness, VERSION, VERSION]),
        last_policy_version=torch.full((4,), VERSION),
        scores=torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        valid=torch.ones(4, dtype=torch.bool),
        truncated=torch.zeros(4, dtype=torch.bool),
    )


def changed(base: RunConfig, combination: tuple[str, str, int, int, bool], **algorithm: Any) -> RunConfig:
    choice, correction, staleness, updates, comparable = combination
    config = base.algorithm
    options = {"old_log_probs": choice, "kl_coef": 0.0, "advantage": "grpo"} | algorithm
    correcting = config.correction.model_copy(update=CORRECTIONS[correction])
    return base.model_copy(
        update={
            "algorithm": config.model_copy(update={"correction": correcting, **options}),
            "schedule": base.schedule.model_copy(update={"max_staleness": staleness}),
            "trainer": base.trainer.model_copy(update={"updates_per_step": updates}),
            "rollout": base.rollout.model_copy(update={} if comparable else {"top_p": 0.9}),
        }
    )


def prepare(config: RunConfig, registry: Registry, session: Session) -> None:
    """What the learner does before its updates."""
    kind = registry.backend(BackendKind.ROLLOUT, config.rollout.backend).log_prob_kind
    algorithm = build_algorithm(config, registry, comparable=comparable_log_probs(kind, config.rollout))
    view = Recorder()
    roles = {name: group for name, group in session.roles.items() if name in needed_roles(config)}
    learner = PolicyLearner(
        replace(session, roles=roles),
        algorithm,
        LearnerOptions(parity_threshold=1.0),
        TrainerState(policy_version=VERSION),
        view,
    )
    batch = stale_batch(config.schedule.max_staleness)
    prepared, _ = algorithm.prepare(batch.with_tokens(rollout_log_probs=batch["old_log_probs"]), learner)
    prepared.validate()


def is_refused(config: RunConfig, registry: Registry) -> bool:
    """Whether the checks of a configuration refuse its log-probs."""
    found = [*(f"algorithm.{each.path}" for each in config.algorithm.problems())]
    found += [each.path for each in check_run(config, registry, "qwen2")]
    return any(path.startswith(("algorithm.old_log_probs", "algorithm.correction")) for path in found)


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize(("share", "advantage"), [(None, "grpo"), (0.5, "grpo"), (0.5, "gae")])
def test_the_learner_makes_the_passes_that_the_plan_counts(
    kl: str,
    share: float | None,
    advantage: str,
    base: RunConfig,
    registry: Registry,
    session: Session,
    made: list[tuple[str, str]],
) -> None:
    """Every choice of old log-probs, correction, staleness, number of updates and kind of rollout log-probs."""
    counts: Counter[int] = Counter()
    for combination in COMBINATIONS if advantage == "gae" else COMBINATIONS[::7]:
        config = changed(base, combination, entropy_share=share, advantage=advantage, **KINDS[kl])
        planned = planned_passes(config, registry)
        made.clear()
        if planned.old.corrects_twice or (planned.old.compared and not combination[-1]):
            assert is_refused(config, registry), combination
            with pytest.raises(ConfigError, match=r"old_log_probs|correction"):
                prepare(config, registry, session)
            continue
        prepare(config, registry, session)
        assert made == [(each.role, each.output) for each in planned.passes], combination
        counts[len(made)] += 1
    assert len(counts) == 2  # with the actor's log-probs, and without them


def test_a_pass_that_only_the_loss_asks_for_is_counted(
    base: RunConfig, registry: Registry, session: Session, made: list[tuple[str, str]]
) -> None:
    config = changed(base, ("auto", "none", 0, 1, True), loss=f"{Path(__file__).stem}:needs_entropy")
    prepare(config, registry, session)
    assert (
        made == [(each.role, each.output) for each in planned_passes(config, registry).passes] == [("actor", "entropy")]
    )
