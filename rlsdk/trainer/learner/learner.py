"""The learner: executes an algorithm on a run's models, from a batch of groups to optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlsdk.algorithms import log_prob_difference
from rlsdk.config.sections.role_kinds import ACTOR, REF, ROLLOUT, TRAINED_ROLES
from rlsdk.interfaces import (
    Algorithm,
    Batch,
    BatchError,
    ConfigError,
    ForwardBackwardResult,
    ParityError,
    Update,
    nearest,
)
from rlsdk.kit.model.hf import model_vocabulary
from rlsdk.rollouts import Group
from rlsdk.trainer.inputs.prompt_scorers import PromptScorer, prompt_outputs
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.inputs.teachers import OwnPrompts, Taught, own_of
from rlsdk.trainer.inputs.text_alignment import OwnText
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.learner.model_scores import with_step_ends
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.roles.hosts import MiniBatchResult

if TYPE_CHECKING:
    from rlsdk.trainer.roles.role_group import RoleGroup
    from rlsdk.trainer.roles.session import Session
    from rlsdk.trainer.tracking.events import RunView

LEAST_MOVED = 0.4
"""Share of moved weights below which rounding changes log-probs more than the adapter does (as much at 0.44)."""
IDENTITY = ("uid", "sample")
"""Fields that say which sample a row is of; a row keeps them wherever it goes, beside its `row_id`."""


@dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """Options of the learner."""

    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of reward models, by role."""
    step_readers: Mapping[str, StepReader] = field(default_factory=dict)
    """What finds the ends of steps for process reward models, by role."""
    taught: Sequence[Taught] = ()
    """What each teacher teaches."""
    exact_teachers: Sequence[str] = ()
    """Roles of teachers whose heads the policy's workers need, in the order of the configuration."""
    scorers: Mapping[str, PromptScorer] = field(default_factory=dict)
    """By role, the teachers that are rollout engines or services."""
    update_timeout_s: float | None = None
    parity_threshold: float
    parity_is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Result of a step."""

    batch: Batch
    """The batch with all computed fields."""
    results: Mapping[str, Sequence[MiniBatchResult]]
    """By trained role, one result per optimizer step; empty for the actor while the critic warms up."""
    metrics: Mapping[str, float]
    """Metrics other than those of the optimizer steps."""


class PolicyLearner:
    """Executes the steps of an algorithm; satisfies `rlsdk.interfaces.Models` for it."""

    def __init__(
        self, session: Session, algorithm: Algorithm, options: LearnerOptions, state: TrainerState, view: RunView
    ) -> None:
        self.session = session
        self.algorithm = algorithm
        self.options = options
        self.state = state
        self.view = view
        self._parity_checked = False
        self._vocabularies: dict[str, int] = {}
        self._said_rounding = False
        self._own_prompts: Mapping[str, OwnPrompts | OwnText] = {}

    def show(self, groups: Sequence[Group]) -> None:
        """Gives teachers with templates of their own what they read of a step's groups."""
        own = [one for one in self.options.taught if one.own_prompts is not None]
        self._own_prompts = {one.role: own_of(groups, one) for one in own}

    def learn(self, batch: Batch, step: int, clock: StepClock) -> Learned:
        """Trains on a step's batch.

        Args:
            batch: complete, graded groups.
            step: number of steps before this one.
            clock: receives the seconds of each phase.
        """
        with self.view.phase("log_probs"), clock.measure("log_probs"):
            if not self._parity_checked:
                self._load_teachers()
                self._check_parity(batch)
            batch, metrics = self.algorithm.prepare(with_step_ends(batch, self.options.step_readers), self)
        with clock.measure("advantages"):
            batch, more = self.algorithm.advantages(batch)
        with clock.measure("update"):
            made = self._update(self.algorithm.updates(batch, step=step))
        return Learned(batch=batch, results=made, metrics={**metrics, **more, **self._rounding()})

    @property
    def roles(self) -> Collection[str]:
        """See `Models`."""
        computing = {name for name, group in self.session.roles.items() if not group.role.is_rollout}
        computing |= {one.role for one in self.options.taught} | set(self.options.scorers)
        return computing | ({REF} if self.session.is_own_reference else set())

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """See `Models`."""
        return self.options.reward_weights

    @property
    def policy_version(self) -> int:
        """See `Models`."""
        return self.state.policy_version

    def forward(self, role: str, batch: Batch, output: str) -> Tensor:
        """See `Models`."""
        return self.outputs(role, batch, (output,))[output]

    def outputs(self, role: str, batch: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Models`."""
        self._check_role(role)
        own = self._own_prompts.get(role)
        read = (batch if own is None else own.read(batch)).keep(("input_ids", "response_mask", *IDENTITY))
        if (scorer := self.options.scorers.get(role)) is not None:
            found: Mapping[str, Tensor] = self._scored(role, scorer, read, names)
        else:
            found = self._computed(role, read, names)
        return found if own is None else own.back(batch, found)

    def _computed(self, role: str, read: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        """By a train engine."""
        for one in self.options.taught:
            if one.role == role and one.teacher.is_policy:
                role = ACTOR if one.teacher.weights == "now" else REF
        group, method = self.session.computing(role)
        self._check_vocabulary(group, read)
        needed = self.session.put(read)
        with self.session.turns.using(group.name):
            outputs = {name: name for name in names}
            answer: Batch = group.run(method, needed, outputs, timeout_s=self.options.update_timeout_s)
        return {name: answer[name] for name in names}

    def _scored(self, role: str, scorer: PromptScorer, read: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        """By a rollout engine of the run, or by a service."""
        if role not in self.session.roles:
            return prompt_outputs(scorer, read, names)
        self._check_vocabulary(self.session[role], read)
        with self.session.turns.using(role):
            return prompt_outputs(scorer, read, names)

    def check_difference(self, mean: float, largest: float) -> None:
        """Compares the engines' log-prob difference on the same tokens, in nats, with `trainer.parity_threshold`.

        Raises:
            ParityError: the difference is larger, and `trainer.parity_action` is `error`.
        """
        limit = self.options.parity_threshold
        if mean <= limit:
            return
        text = (
            f"train backend {self.session.actor.backend!r} and rollout backend {self.session.rollout.backend!r} give "
            f"the same tokens log-probs that differ by {mean:.4f} nats on average (largest {largest:.4f}); "
            f"trainer.parity_threshold is {limit}"
        )
        if self.options.parity_is_error:
            raise ParityError(f"{text}. Compare model.dtype and the engines' options, or raise the threshold.")
        self.view.notice(f"warning: {text}")

    def _check_vocabulary(self, group: RoleGroup, batch: Batch) -> None:
        """Checks that a model other than the policy knows every token: the policy may sample ids that only it has, such
        as those of the padding of its vocabulary.

        Raises:
            BatchError: it does not; names the token.
        """
        if group.role.model.path == self.session.actor.role.model.path or not batch.num_tokens:
            return
        if (size := self._vocabularies.get(group.name)) is None:
            size = self._vocabularies[group.name] = model_vocabulary(group.role.model)
        if (token := int(batch["input_ids"].max())) >= size:
            raise BatchError(
                f"{group.name} ({group.role.fields['path']} {group.role.model.path!r}) has vocab_size {size}, and the "
                f"policy sampled token {token}, which is beyond it; use a model with rows for every token of the policy"
            )

    def _load_teachers(self) -> None:
        """Gives the policy's workers the heads of the teachers whose distributions they compare with."""
        for number, role in enumerate(self.options.exact_teachers):
            spec = self.session[role].role.model
            self.session.actor.run("load_teacher", spec, number, timeout_s=self.options.update_timeout_s)

    def _check_role(self, role: str) -> None:
        if role not in self.roles:
            known = sorted(self.roles)
            raise ConfigError(
                f"the algorithm asks role {role!r}, which this run does not have{nearest(role, known)}; it has "
                f"{known}. An algorithm names the roles that it needs in its attribute `roles`"
            )

    def _rounding(self) -> Mapping[str, float]:
        """Share of the served weights that the adapter changes at all, where rounding may lose changes."""
        model = self.session.actor.role.model
        rollout = self.session.roles.get(ROLLOUT)  # a replay has none
        served_apart = rollout is not None and rollout.role.model.adapter is not None
        if model.adapter is None or served_apart or model.dtype == "float32":
            return {}
        with self.session.turns.using(ACTOR):
            share = float(self.session.actor.run("moved_share", timeout_s=self.options.update_timeout_s))
        if share < LEAST_MOVED and not self._said_rounding:
            self._said_rounding = True
            self.view.notice(
                f"warning: adding the adapter to {model.dtype} weights changes {share:.1%} of them; the other changes "
                "are lost by rounding, so that samples are not quite the trained policy's "
                "(policy/adapter_moved_share). Usual in the first steps; if it stays, raise train.optim.lr or use "
                "model.dtype float32"
            )
        return {"policy/adapter_moved_share": share}

    def _update(self, updates: Sequence[Update]) -> Mapping[str, list[MiniBatchResult]]:
        """Runs the optimizer steps in order; returns the results by role."""
        made: dict[str, list[MiniBatchResult]] = {name: [] for name in TRAINED_ROLES}
        with self.view.phase("update", total=len(updates)):
            for role, steps in groupby(updates, lambda update: update.role):
                if role not in made:
                    raise ConfigError(f"the algorithm updates role {role!r}: expected one of {sorted(made)}")
                those = list(steps)
                if those[-1].adds:
                    raise ConfigError(f"the algorithm's last update of role {role!r} adds to a step that never comes")
                made[role] += self._update_role(role, those)
        return made

    def _update_role(self, role: str, updates: Sequence[Update]) -> Iterator[MiniBatchResult]:
        """Runs one role's updates: all are submitted at once, and the workers run them in order."""
        self._check_role(role)
        group = self.session[role]
        with self.session.turns.using(role, training=True):
            stored: dict[Any, Any] = {}
            waiting: list[Any] = []
            for step in updates:
                key = (id(step.batch), tuple(step.fields))
                if key not in stored:
                    stored[key] = self.session.put(step.batch.keep(("input_ids", *IDENTITY, *step.fields)))
                method = "add_gradient" if step.adds else "update"
                waiting.append(group.submit(method, stored[key].select(step.rows), step.objective))
            added: list[ForwardBackwardResult] = []
            for step, pending in zip(updates, waiting, strict=True):
                result = pending.result(self.options.update_timeout_s)
                if step.adds:
                    added.append(result)
                else:
                    yield replace(result, added=tuple(added))
                    added.clear()
                self.view.advance()

    def _check_parity(self, batch: Batch) -> None:
        """Checks before the first update that both engines compute the same log-probs for the same tokens.

        Raises:
            ParityError: they differ, and `trainer.parity_action` is `error`.
        """
        self._parity_checked = True
        trained = self.forward(ACTOR, batch, "log_probs")
        difference = log_prob_difference(trained, batch["rollout_log_probs"], batch["response_mask"])
        self.check_difference(difference.mean_abs, difference.max_abs)
