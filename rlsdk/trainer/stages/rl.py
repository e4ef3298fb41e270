"""The stage for reinforcement learning: groups from the stream, updates of the actor, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlsdk.config.sections.role_kinds import ACTOR, kind_of
from rlsdk.interfaces import Batch
from rlsdk.rollouts import Group, make_batch
from rlsdk.rollouts.groups.receipts import SAMPLED, TRAINED, check_receipts, token_account
from rlsdk.trainer.generation.group_source import GroupSource
from rlsdk.trainer.generation.publishing import Publisher
from rlsdk.trainer.generation.timeline import staleness_metrics
from rlsdk.trainer.inputs.grading import CorrectRule, GradeSummary, check_failures
from rlsdk.trainer.inputs.teachers import with_taught
from rlsdk.trainer.learner.learner import Learned, PolicyLearner
from rlsdk.trainer.learner.metrics import (
    SPECIAL,
    UPDATE_METRICS,
    StepClock,
    batch_metrics,
    special_share,
    sync_metrics,
)
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.learner.watch import ADVANTAGES, LearningWatch, quantized_notice
from rlsdk.trainer.roles.policy_average import PolicyAverage
from rlsdk.trainer.stages.evaluation.run import Evaluated, Evaluation, rollout_info
from rlsdk.trainer.stages.evaluation.schedule import Evaluations
from rlsdk.trainer.stages.evaluation.settings import EvalOptions
from rlsdk.trainer.stages.stage import Stage, StageSettings
from rlsdk.trainer.tracking.run_output import RunOutput
from rlsdk.trainer.tracking.samples import SampleLog, shown_samples
from rlsdk.trainer.tracking.step_times import REUSED
from rlsdk.trainer.tracking.stopping import PreemptedError


@dataclass(frozen=True, kw_only=True)
class RlOptions:
    """Options of the reinforcement learning stage."""

    temperature: float
    reward_names: Sequence[str]
    correct: CorrectRule = field(default_factory=CorrectRule)
    """Which samples count as correct."""
    max_failure_share: float
    """Largest allowed share of a step's samples without a score; more end the run."""
    special: Collection[int]
    """Special tokens that are no stop tokens: responses with one are counted."""
    shown_samples: SampleLog
    """Which samples of each step are logged with their text."""
    has_entropy: bool = True
    """Whether the samples' log-probs estimate the policy's entropy."""
    accounts_for_sampler: bool = False
    """Whether the policy that sampled is in the ratio or in a weight, so that its difference is corrected."""
    max_staleness: int = 0
    """Largest staleness in steps; above 0, groups are made while a step trains."""
    preempt_s: float = 60.0
    """Seconds from the preemption notice until the process must end."""


class RlStage(Stage):
    """Stage in which each step takes groups from the schedule, and the learner trains on them."""

    def __init__(
        self,
        source: GroupSource,
        learner: PolicyLearner,
        publisher: Publisher,
        evaluation: Evaluation | None,
        output: RunOutput,
        options: RlOptions,
        settings: StageSettings,
        state: TrainerState,
        when: EvalOptions | None = None,
        average: PolicyAverage | None = None,
    ) -> None:
        """`state` is shared with `publisher`, which syncs its policy version to the replicas; `when` schedules
        `evaluation`."""
        self.source = source
        self.learner = learner
        self.publisher = publisher
        self.output = output
        self._rules = {} if evaluation is None else {part.name: part.rule for part in evaluation.sets}
        self.evaluations = Evaluations(
            None if evaluation is None else partial(self._evaluate, evaluation), output, when
        )
        self.options = options
        self.settings = settings
        self.state = state
        self.average = average
        self._step_of = {state.policy_version: 0}
        self._halted = self._settled = self._quantized_noted = False
        self._watch = LearningWatch()
        """Newest step that ended with each policy version, for all versions that samples may have."""

    def begin(self) -> None:
        self.source.begin(self.step)
        self.output.view.judged(self._rules)
        self.evaluations.before(self.step)

    def advance(self) -> Mapping[str, float]:
        clock = StepClock()
        groups = self.collect(clock)
        summary = GradeSummary.of_groups(groups, self.options.reward_names, self.options.correct)
        self.state.count_failures(summary.failures)
        check_failures(summary, self.options.max_failure_share, self.output.view)
        learned = learn_from(groups, self.learner, self.state, self.step, self.options.temperature, clock)
        staleness = staleness_metrics(learned.batch, self.step, self._step_of, self.options.max_staleness)
        if self.average is not None:
            with clock.measure("average"):
                self.average.update()
        self.step += 1
        evaluates = self.evaluations.is_due(self.step, last=self.step == self.settings.steps)
        self.source.updated(update_figures(learned), pause=evaluates)
        self._note_version()
        metrics = self._metrics(groups, learned, summary, clock) | staleness
        self._report(metrics, groups, learned.batch)
        self._check_parity(metrics)
        self._note_quantized(metrics)
        has_advantages = "advantages" in learned.batch and bool(learned.batch["advantages"].any())
        for text in self._watch.step(self.step, {**metrics, ADVANTAGES: float(has_advantages)}):
            self.output.view.notice(text)
        return metrics

    def collect(self, clock: StepClock) -> list[Group]:
        """Returns the groups of the next step. Waiting time after the last sample counts as reward time if no samples
        for other steps are made meanwhile."""
        if self.options.max_staleness:
            with self.output.view.phase("rollout"), clock.measure("rollout"):
                return self.source.next()
        with self.output.view.phase("rollout"), self.publisher.clocked(clock):
            try:
                return self.source.next()
            except PreemptedError:
                self.halt()  # before the replicas are put to sleep
                raise

    def preempt(self) -> None:
        self.source.preempt()

    def halt(self) -> bool:
        if not self._halted:
            limit_s = self.options.preempt_s / 3
            self._halted, self._settled = True, self.source.settle(limit_s)
            self.source.halt(limit_s)
        return self._settled

    def settle(self) -> None:
        if not self.source.settle() and self.source.failure is not None:
            raise self.source.failure  # a resumed run would start groups with different weights than this run

    def saving(self, step: int) -> None:
        self.source.saving(step)

    def saved(self, step: int, oldest: int) -> None:
        self.source.saved(step, oldest)

    def state_dict(self) -> dict[str, Any]:
        return {
            "trainer": {"step": self.step, **self.state.dump()},
            "algorithm": dict(self.learner.algorithm.state_dict()),
            "source": dict(self.source.state_dict()),
            "evaluations": self.evaluations.state_dict(),
            "versions": sorted(self._step_of.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = dict(state["trainer"])
        self.step = int(saved.pop("step"))
        self.state.restore(saved)
        self.learner.algorithm.load_state_dict(state["algorithm"])
        self.source.load_state_dict(state["source"], step=self.step, version=self.state.policy_version)
        self.evaluations.load_state_dict(state["evaluations"])
        self._step_of = {int(version): int(step) for version, step in state["versions"]}

    def save_parts(self, checkpoint: Path) -> None:
        if self.average is not None:
            self.average.save(checkpoint)

    def begin_save_parts(self, checkpoint: Path) -> Callable[[], None]:
        return super().begin_save_parts(checkpoint) if self.average is None else self.average.begin_save(checkpoint)

    def load_parts(self, checkpoint: Path) -> None:
        if self.average is not None:
            self.average.load(checkpoint)

    def close(self) -> None:
        self.publisher.weights.close()
        self.source.close()

    def _evaluate(self, evaluation: Evaluation) -> Evaluated:
        """Evaluates the current weights on held-out prompts."""
        with ExitStack() as stack:
            if not self.source.serve():
                stack.enter_context(self.publisher.serving())
            return evaluation.run(self.evaluations.stop)

    def _metrics(
        self,
        groups: Sequence[Group],
        learned: Learned,
        summary: GradeSummary,
        clock: StepClock,
    ) -> dict[str, float]:
        report = self.publisher.last_report
        synced = {} if report is None else sync_metrics(report)
        metrics = {
            **batch_metrics(learned.batch, summary, has_entropy=self.options.has_entropy),
            **({SPECIAL: share} if (share := special_share(learned.batch, self.options.special)) else {}),
            **rollout_info(groups),
            **token_metrics(groups),
            "rollout/rejected_groups": float(len(self.source.rejected)),
            **update_figures(learned),
            "policy/version": float(self.state.policy_version),
            "data/epoch": float(self.source.epoch),
            **synced,
            **({"faults/replica_restarts": float(lost)} if (lost := self.publisher.weights.restarts) else {}),
            **({REUSED: float(self.source.num_reused)} if self.source.num_reused else {}),
            **self.source.timeline.metrics(self.publisher.seconds),
            **clock.metrics(),
        }
        metrics["throughput/tokens_per_s"] = learned.batch.num_tokens / metrics["time/step_s"]
        return metrics

    def _note_version(self) -> None:
        """Records the step's weight version; drops versions older than any sample may have."""
        self._step_of[self.state.policy_version] = self.step
        oldest = self.step - self.options.max_staleness - 1
        while len(self._step_of) > 1 and list(self._step_of.values())[1] <= oldest:
            del self._step_of[next(iter(self._step_of))]

    def _report(self, metrics: Mapping[str, float], groups: Sequence[Group], batch: Batch) -> None:
        samples = shown_samples(groups, batch, self.options.shown_samples)
        self.output.track(self.step, metrics, samples)
        self.output.view.step(self.step, self.settings.steps, metrics)
        self.output.view.samples(self.step, samples)

    def _note_quantized(self, metrics: Mapping[str, float]) -> None:
        """Warns once that the sampled policy (quantized weights) is not the trained one."""
        report = self.publisher.last_report
        if report is not None and not self._quantized_noted:
            self._quantized_noted = True
            accounted = self.options.accounts_for_sampler
            if text := quantized_notice(report.quantized_tensors, report.num_tensors, metrics, accounted=accounted):
                self.output.view.notice(text)

    def _check_parity(self, metrics: Mapping[str, float]) -> None:
        """Compares the engines' log-probs only on samples of the current weights: those of older weights differ
        anyway."""
        if "parity/log_prob_diff_mean" in metrics and not metrics.get("schedule/staleness_max"):
            self.learner.check_difference(metrics["parity/log_prob_diff_mean"], metrics["parity/log_prob_diff_max"])


def learn_from(
    groups: Sequence[Group],
    learner: PolicyLearner,
    state: TrainerState,
    step: int,
    temperature: float,
    clock: StepClock,
) -> Learned:
    """Makes the updates of a step, and counts them in `state`.

    Raises:
        BatchError: the samples do not account for the tokens that would be trained.
    """
    batch = with_taught(make_batch(groups, temperature=temperature), groups, learner.options.taught)
    check_receipts(groups, batch)
    learner.show(groups)
    learned = learner.learn(batch, step, clock)
    for result in learned.results[ACTOR]:
        state.count_update(result.step)
    state.count_batch(batch)
    return learned


def token_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Sampled tokens of a step, and what became of them; empty where all of them are trained."""
    found = token_account(sample for group in groups for sample in group.samples)
    if found[SAMPLED] == found[TRAINED]:
        return {}
    return {f"tokens/{name}": float(count) for name, count in found.items()}


def update_figures(learned: Learned) -> dict[str, float]:
    """Metrics of the updates of a step."""
    metrics = dict(learned.metrics)
    for role, results in learned.results.items():
        metrics |= UPDATE_METRICS[kind_of(role).head](results)
    return metrics
