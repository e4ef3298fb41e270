"""Old names of requirements: `rlsdk plugins check --only` and omissions in a suite's class answer with the new ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlsdk.interfaces import ConfigError

RENAMED: Mapping[str, str] = {
    "company.kinds": "batch_invariance.kinds",
    "company.alone": "batch_invariance.seeded",
    "company.minority": "batch_invariance.minority",
    "company.random": "batch_invariance.random_batches",
    "company.many": "batch_invariance.many_samples",
    "company.like_prompts": "batch_invariance.similar_prompts",
    "company.names": "batch_invariance.request_ids",
    "company.stops": "batch_invariance.stop_tokens",
    "company.staggered": "batch_invariance.staggered_calls",
    "company.any_token": "any_token",
    "company.slow_caller": "slow_caller",
    "company.as_they_finish": "streaming",
    "company.manners": "torch_modes",
    "outputs.company": "outputs.batch_invariance",
    "calls_join": "continuous_batching",
    "calls_at_once": "concurrent_calls",
    "looks.cheap": "polling_is_cheap",
    "outputs.own": "outputs.ownership",
    "requests.own": "requests.ownership",
    "noise": "independent_draws",
    "noise.seeds": "independent_draws.seeds",
    "noise.lifetime": "independent_draws.lifetime",
    "distribution.cold": "distribution.low_temperature",
    "distribution.fine": "distribution.rare_tokens",
    "distribution.special": "distribution.special_tokens",
    "update.little": "update.small_change",
    "update.nothing_old": "update.nothing_cached",
    "update.behind_failure": "update.after_failure",
    "pause.still": "pause.nothing_decoded",
    "abort.kept": "abort.keeps_tokens",
    "abort.still_paused": "abort.keeps_pause",
    "life": "random_calls",
    "life.fresh": "random_calls.random_weights",
    "life.frozen": "random_calls.frozen",
    "life.heads": "random_calls.heads",
    "life.models": "random_calls.models",
    "life.ranks": "random_calls.ranks",
    "life.splits": "random_calls.splits",
    "steady.kinds": "random_calls.read_only",
    "steady.forward": "read_only.forward",
    "steady.layout": "read_only.layout",
    "steady.no_rows": "read_only.no_rows",
    "steady.save": "read_only.save",
    "steady.offload": "offload.any_time",
    "steady.offload_changed": "offload.changed",
    "steady.offload_frozen": "offload.frozen",
    "steady.half_awake": "offload.partial",
    "ranks.steady": "ranks.read_only",
    "ranks.alone": "ranks.not_collective",
    "ranks.unlike": "ranks.uneven_rows",
    "ranks.widened": "ranks.more_ranks",
    "step.unlike_calls": "step.uneven_calls",
    "step.loss_alone": "step.infinite_loss",
    "objective.given": "objective.inputs",
    "outputs.entropy_cold": "outputs.entropy_low_temperature",
    "together": "isolation",
    "together.ranks": "isolation.ranks",
    "together.checkpoints": "isolation.checkpoints",
    "sync.life": "sync.random_calls",
    "sync.together": "sync.consecutive_pieces",
    "sync.apart": "sync.isolation",
    "sync.proven": "sync.verified",
    "sync.proven.first": "sync.verified.first",
    "sync.proven.each": "sync.verified.each",
}
"""Name before interface 2.1 -> its name now; the table goes with interface 2.2."""
FAMILIES: Mapping[str, str] = {
    "company": "(batch_invariance or any_token or slow_caller or streaming or torch_modes)",
    "looks": "polling_is_cheap",
    "steady": "(read_only or offload)",
}
"""What several old names began with -> an expression of the new ones."""
IRREGULAR: Mapping[str, str] = {
    "test_like_prompts": "company.like_prompts",
    "test_as_they_finish": "company.as_they_finish",
    "test_manners": "company.manners",
    "test_unlike_calls": "step.unlike_calls",
    "test_loss_alone": "step.loss_alone",
    "test_proven": "sync.proven",
    "test_proven_first": "sync.proven.first",
    "test_proven_each": "sync.proven.each",
    "test_apart": "sync.apart",
}
"""Old functions that were not called as their requirements."""


def check_expression(only: str) -> None:
    """Checks an expression of requirements' names, as `--only` takes it.

    Raises:
        ConfigError: it has old names; the message gives the expression with the new ones.
    """
    new = {**FAMILIES, **RENAMED}
    if old := [word for word in dict.fromkeys(_WORD.findall(only)) if word in new]:
        said = "; ".join(f"{word!r} is now {new[word].strip('()')!r}" for word in old)
        now = _WORD.sub(lambda word: new.get(word[0], word[0]), only)
        raise ConfigError(f"--only {only!r} has old names of requirements: {said}. Run it with --only {now!r}")


def new_name(function: str) -> str | None:
    """The name that the requirement of an old test function has now; None: no requirement had this function."""
    by_function = {f"test_{name.replace('.', '_')}": name for name in RENAMED}
    old = IRREGULAR.get(function) or by_function.get(function)
    return None if old is None else RENAMED[old]


_WORD = re.compile(r"[\w.]+")
