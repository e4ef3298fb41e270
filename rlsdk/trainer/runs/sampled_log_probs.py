"""Log-probs of samples, by the model that sampled them: `rlsdk generate --log-probs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig
from rlsdk.config.sections.role_kinds import ROLLOUT
from rlsdk.interfaces import BackendKind, Capability, ConfigError
from rlsdk.interfaces.spelling import as_given
from rlsdk.rollouts import Group
from rlsdk.trainer.generation.replicas import CallsRanks, replicas_of
from rlsdk.trainer.inputs.log_prob_files import AnswerLogProbs, answer_key, write_log_probs
from rlsdk.trainer.inputs.prompt_scorers import EngineScorer, run_apart
from rlsdk.trainer.inputs.teacher_tokenizers import token_bytes
from rlsdk.trainer.runs.keep_rules import Keeping, KeepRule

if TYPE_CHECKING:
    from rlsdk.registry import Registry

AT_ONCE = 512
"""Rows that are handed to the engine at once; their log-probs pass through this process."""


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Which log-probs of samples are written, and where."""

    count: int
    """k: of the sampled tokens, and of the k most probable ones in each place."""
    path: Path
    """File to write (`rlsdk.trainer.inputs.log_prob_files`)."""

    def check(self, config: RunConfig, registry: Registry, rule: KeepRule) -> None:
        """Whether a run can write them.

        Raises:
            ConfigError: the rows would be pairs; or the rollout engine gives no log-probs of prompts.
        """
        if rule.keeping is Keeping.PAIRS:
            raise ConfigError(f"{as_given('log_probs', self.count)}: belongs to answers, and keep is 'pairs'")
        spec = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
        if Capability.PROMPT_LOG_PROBS not in spec.capabilities:
            kinds = registry.usable(BackendKind.ROLLOUT)
            able = [
                name for name in kinds
                if Capability.PROMPT_LOG_PROBS in registry.backend(BackendKind.ROLLOUT, name).capabilities
            ]  # fmt: skip
            raise ConfigError(
                f"rollout.backend: {config.rollout.backend!r} gives no log-probs of given tokens; expected one of "
                f"{able}"
            )

    def with_room(self, config: RunConfig) -> RunConfig:
        """The configuration of an engine that reads a whole sample, and samples one token behind it."""
        room = {"max_model_tokens": config.max_model_tokens + 1}
        return config.model_copy(update={"rollout": config.rollout.model_copy(update=room)})

    def write(
        self, config: RunConfig, rule: KeepRule, groups: Sequence[Group], served: CallsRanks, tokenizer: Any
    ) -> None:
        """Computes them of every sample, equal texts of a prompt once, and writes the file.

        Args:
            config: of the call.
            rule: which samples are kept.
            groups: the samples of each prompt.
            served: ranks of the rollout engine; nothing else asks them meanwhile.
            tokenizer: of the model.
        """
        rollout = config.rollout
        replicas = replicas_of(served, backend=rollout.backend, max_running=rollout.max_running_samples)
        scorer = EngineScorer(ROLLOUT, replicas, progress_s=config.deadlines.rollout_s)
        rows = [*dict(_rows(groups)).items()]
        found: dict[bytes, AnswerLogProbs] = {}
        for start in range(0, len(rows), AT_ONCE):
            part = rows[start : start + AT_ONCE]
            scores = run_apart(scorer.score([[*prompt, *answer] for _, (prompt, answer) in part], self.count))
            for (key, (_, answer)), one in zip(part, scores, strict=True):
                behind = len(one.log_probs) - len(answer)
                found[key] = AnswerLogProbs(
                    token_ids=answer,
                    log_probs=one.log_probs[behind:],
                    top_ids=one.top_ids[behind:],
                    top_log_probs=one.top_log_probs[behind:],
                )
        filtered = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, 1.0, 0, 0.0)
        write_log_probs(
            self.path,
            found,
            token_bytes(tokenizer),
            model=str(config.model.path),
            whole_distribution=rule.keeping is Keeping.ALL and not filtered,
        )


def _rows(groups: Sequence[Group]) -> Iterator[tuple[bytes, tuple[Sequence[int], Any]]]:
    """Key, prompt and response of each sample; of equal texts the last counts, and a cut one only if all are cut."""
    for group in groups:
        prompt = group.task.prompt.prompt_ids
        for sample in sorted(group.samples, key=lambda one: not one.truncated):
            if sample.rows and len(sample.rows[0].response_ids):
                yield answer_key(prompt, sample.text), (prompt, sample.rows[0].response_ids)
