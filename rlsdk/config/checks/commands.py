"""What each command reads of a configuration; `tests/trainer/test_what_is_read.py` compares it with real runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlsdk.config.derived.roles import needed_roles
from rlsdk.config.loading.reads import Reader
from rlsdk.config.problem import Problem
from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.config.sections.base import fields_of
from rlsdk.config.sections.evaluation import OF_UNNAMED
from rlsdk.config.sections.old_log_probs import choose_old_log_probs
from rlsdk.config.sections.role_kinds import ROLE_KINDS
from rlsdk.config.sections.schedule import beside_rollout
from rlsdk.config.sections.schema import RunConfig
from rlsdk.config.sections.supervised import SftConfig
from rlsdk.interfaces.spelling import Setting

_ENGINE = ("model", "placement", "deadlines.start_s", "deadlines.collective_s", "trainer.seed")
_ACTOR = (
    *(f"train.{name}" for name in ("backend", "options", "engine_kwargs", "activation_checkpointing")),
    *(f"train.{name}" for name in ("micro_batch_tokens", "micro_batch_rows")),
    *(f"train.optim.{name}" for name in ("betas", "eps", "weight_decay", "max_grad_norm", "min_lr_ratio")),
)
_LOOP = (
    *(f"trainer.{name}" for name in ("run_dir", "run_name", "resume", "keep_checkpoints")),
    *(f"deadlines.{name}" for name in ("update_s", "sync_s", "save_s")),
    *(f"faults.{name}" for name in ("session_restarts", "preempt_s")),
    *(f"tracking.{name}" for name in ("trackers", "options")),
    *(f"eval.{name}" for name in ("every_steps", "at_start", "early_stopping")),
    "checkpoint",
)
_ANSWERS = ("data", "rollout.max_response_tokens", "rollout.stop_token_ids")
_PAIRS = (*_ENGINE, *_ACTOR, *_LOOP, *_ANSWERS, "trainer.callbacks", "preferences")
_OF_REWARD_MODEL = ("preferences.margin_field", "preferences.center_coef")
_OF_DPO = tuple(f"preferences.{name}" for name in ("loss", "label_smoothing", "target_margin", "sft_coef"))
_OF_KTO = tuple(f"preferences.{name}" for name in ("label_field", "desirable_weight", "undesirable_weight"))
_OF_STEPS = tuple(f"preferences.{name}" for name in ("step_field", "step_label_field", "step_separator"))
_BETA = "preferences.beta"
_ANSWERS_OF_PAIRS = ("preferences.chosen_field", "preferences.rejected_field")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SAMPLER = (*_ENGINE, "data", "rollout", "gateway", "deadlines.rollout_s", "schedule.on_new_weights")
_NOT_OF_SAMPLER = ("model.path", "model.init_from_config", "model.lora", "data.shuffle")
_PATH = {"model.path": "the model is the one at PATH, the command's first argument"}
_RESPONSES = dict.fromkeys(
    ("trainer.samples_per_prompt", "eval.samples_per_prompt"), "`--samples-per-prompt` is the number of responses"
)
_HELD_OUT = ("data.eval", "data.eval_options", "data.num_eval_rows")
_EVALUATED = (*OF_UNNAMED, "sets", "save_samples", "best_of")


def _of_reinforcement(config: RunConfig) -> Iterator[Problem]:
    """What `rlsdk train` does not read with these values."""
    algorithm, needed = config.algorithm, needed_roles(config)
    for kind in ROLE_KINDS:
        if kind.is_optional and kind.name not in needed:
            yield from fields_of((kind.section, *kind.with_fields), kind.unneeded.format(algorithm=algorithm))
    if algorithm.name == POLICY_GRADIENT:
        yield from _of_policy_gradient(config)
    if not config.teachers:
        yield Problem("algorithm.distillation", "there are no teachers")
    elif not config.rewards and not config.reward_models:
        yield Problem("algorithm.distillation.reward_coef", "there are no rewards")
    if not config.sft.is_asked:
        names = (f"sft.{name}" for name in SftConfig.model_fields if name not in ("steps", "epochs"))
        yield from fields_of(names, "sft.steps is 0, so that there is no supervised training")
    if not any([*config.rewards, *(part.rewards for part in config.eval.sets.values())]):
        names = (f"reward_limits.{name}" for name in type(config.reward_limits).model_fields)
        named = (name for name in names if name != "reward_limits.max_failure_share")
        source = "reward_models" if config.reward_models else "teachers"
        yield from fields_of(named, f"no reward is graded: what is learned comes from {source}")
    sharing = beside_rollout(config.placement)
    if sharing:
        yield Problem("faults.replica_restarts", f"the rollout shares its devices with {sharing}")
    for name, optim in {"train.optim": config.train.optim, "critic.optim": config.critic.optim}.items():
        warm_start_decays = name == "train.optim" and config.sft.is_asked and config.sft.schedule != "constant"
        if not warm_start_decays:
            yield from _of_decay(name, optim.schedule, name)
    yield from _of_evaluation(config)
    yield from _of_sets(config)


def _of_policy_gradient(config: RunConfig) -> Iterator[Problem]:
    own, correction = config.algorithm, config.algorithm.correction
    if not own.kl_coef:
        names = ("kl_estimator", "kl_reward_estimator", "kl_horizon")
        yield from fields_of((f"algorithm.{name}" for name in names), "algorithm.kl_coef is 0")
    elif own.kl_in_reward:
        instead = (Setting("algorithm.kl_reward_estimator"),)
        yield Problem("algorithm.kl_estimator", "algorithm.kl_in_reward is true:", commands=instead)
    else:
        instead = (Setting("algorithm.kl_estimator"),)
        yield Problem("algorithm.kl_reward_estimator", "algorithm.kl_in_reward is false:", commands=instead)
    if not own.kl_in_reward:
        yield Problem("algorithm.kl_target", "algorithm.kl_in_reward is false")
    if own.kl_target is None:
        yield Problem("algorithm.kl_horizon", "algorithm.kl_target is null")
    updates = config.trainer.updates_per_step * config.trainer.epochs_per_step
    chosen = choose_old_log_probs(own, stale=config.schedule.overlaps, num_updates=updates)
    if correction.mode == "none" and (correction.reject != "none" or not chosen.correct):
        names = ("level", "upper", "lower")
        yield from fields_of((f"algorithm.correction.{name}" for name in names), "algorithm.correction.mode is 'none'")


def _of_supervised(config: RunConfig) -> Iterator[Problem]:
    """What `rlsdk sft` and `distill` do not read with these values."""
    yield from _of_decay("train.optim", config.sft.schedule, "sft")
    yield from _of_evaluation(config)


def _of_pairs(config: RunConfig) -> Iterator[Problem]:
    """What `rlsdk dpo`, `kto`, `reward-model` and `process-reward` do not read with these values."""
    yield from _of_decay("train.optim", config.preferences.schedule, "preferences")
    yield from _of_evaluation(config)


def _of_dpo(config: RunConfig) -> Iterator[Problem]:
    """What `rlsdk dpo` does not read with these values."""
    own = config.preferences
    yield from _of_pairs(config)
    if not own.has_reference:
        yield Problem("ref", f"preferences.loss {own.loss!r} has no reference model")
    if own.loss != "simpo":
        yield Problem("preferences.target_margin", f"preferences.loss is {own.loss!r}, not 'simpo'")


def _of_kept(config: RunConfig) -> Iterator[Problem]:
    """What `rlsdk generate --keep` does not read with these values."""
    yield Problem("reward_limits.max_failure_share", "samples without a score are not kept, however many")


def _of_decay(path: str, schedule: str, named: str) -> Iterator[Problem]:
    if schedule == "constant":
        yield Problem(f"{path}.min_lr_ratio", f"{named}.schedule is 'constant'")


def _of_evaluation(config: RunConfig) -> Iterator[Problem]:
    """What a command that trains does not read without evaluations."""
    if config.eval.every_steps is None:
        names = (f"eval.{name}" for name in type(config.eval).model_fields if name != "every_steps")
        yield from fields_of((*names, *_HELD_OUT), "eval.every_steps is null, so that nothing is evaluated")


def _of_sets(config: RunConfig) -> Iterator[Problem]:
    """What an evaluation does not read where every set has rows of its own."""
    if config.eval.sets and all(part.data is not None for part in config.eval.sets.values()):
        yield from fields_of(_HELD_OUT, "each of eval.sets has rows of its own")


TRAIN = Reader(
    command="train",
    fields=tuple(name for name in RunConfig.model_fields if name != "preferences"),
    but=("eval.best_of", "algorithm.distillation.sft_coef"),
    unused=_of_reinforcement,
)
SFT = Reader(command="sft", fields=(*_ENGINE, *_ACTOR, *_LOOP, *_ANSWERS, "sft"), unused=_of_supervised)
DISTILL = Reader(
    command="distill",
    fields=(*_ENGINE, *_ACTOR, *_LOOP, *_ANSWERS, "sft", "teachers", "algorithm.distillation"),
    but=("algorithm.distillation.reward_coef",),
    unused=_of_supervised,
    recipe="distill.yaml",
)
REWARD_MODEL = Reader(
    command="reward-model", fields=_PAIRS, but=(*_OF_DPO, *_OF_KTO, *_OF_STEPS, _BETA), unused=_of_pairs
)
DPO = Reader(command="dpo", fields=(*_PAIRS, "ref"), but=(*_OF_REWARD_MODEL, *_OF_KTO, *_OF_STEPS), unused=_of_dpo)
KTO = Reader(
    command="kto",
    fields=(*_PAIRS, "ref"),
    but=(*_OF_REWARD_MODEL, *_OF_DPO, *_OF_STEPS, *_ANSWERS_OF_PAIRS),
    unused=_of_pairs,
)
PROCESS_REWARD = Reader(
    command="process-reward",
    fields=_PAIRS,
    but=(*_OF_REWARD_MODEL, *_OF_DPO, *_OF_KTO, *_ANSWERS_OF_PAIRS, _BETA, "preferences.answer_template"),
    unused=_of_pairs,
)
EVAL = Reader(
    command="eval",
    fields=(*_SAMPLER, "rewards", "reward_limits", *(f"eval.{name}" for name in _EVALUATED)),
    but=(*_NOT_OF_SAMPLER, *(f"rollout.{name}" for name in _SAMPLING)),
    unused=_of_sets,
    instead=_PATH,
)
EVAL_FIGURES = replace(
    EVAL,
    but=(*EVAL.but, "eval.save_samples"),
    instead={**_PATH, "eval.save_samples": "no samples are written without `--samples FOLDER`"},
)
"""`rlsdk eval` without `--samples`, and a call from Python."""
GENERATE = Reader(command="generate", fields=_SAMPLER, but=_NOT_OF_SAMPLER, instead={**_PATH, **_RESPONSES})
GENERATE_KEPT = replace(
    GENERATE,
    fields=(*_SAMPLER, "rewards", "reward_limits"),
    but=tuple(name for name in _NOT_OF_SAMPLER if name != "data.shuffle"),
    unused=_of_kept,
)
"""`rlsdk generate --keep`, which grades what it samples."""
REWARD_SERVE = Reader(command="reward serve", fields=("rewards", "reward_limits"))
READERS: Mapping[str, Reader] = {
    reader.command: reader
    for reader in (TRAIN, SFT, DISTILL, REWARD_MODEL, DPO, KTO, PROCESS_REWARD, EVAL, GENERATE, REWARD_SERVE)
}
"""By what is typed behind `rlsdk`. `plan` and `chaos` take the arguments of `train`."""
