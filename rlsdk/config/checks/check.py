"""Checks a configuration against the installed plugins, before a device is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rlsdk.config.checks.agents import agent_problems
from rlsdk.config.checks.context import context_problems
from rlsdk.config.checks.requirements import device_of, devices_of, role_requirements
from rlsdk.config.checks.watched import reported_in_rl, watch_problems
from rlsdk.config.derived.auto_values import with_dtype
from rlsdk.config.derived.roles import Role, needed_roles, roles
from rlsdk.config.introspection.options import backend_options, options_problems
from rlsdk.config.introspection.parameters import option_problems
from rlsdk.config.problem import Problem, shown, unknown_key
from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.config.sections.base import Options
from rlsdk.config.sections.engines import SINGLE_TURN
from rlsdk.config.sections.old_log_probs import OldLogProbs, choose_old_log_probs, differing_settings
from rlsdk.config.sections.role_kinds import ACTOR, OPTIONAL_ROLES, ROLLOUT
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import Algorithm, BackendKind, Capability, ChecksPlace, Head, LogProbKind, RlsdkError
from rlsdk.interfaces.spelling import Setting
from rlsdk.registry import ComponentKind, Registry, Requirements, explain_lack, lacks

SCORING = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of architecture names that have a classification head."""

NIXL = ("nixl", "nixl_cu13", "nixl_cu12")
"""Packages that contain the library of the transport of that name, one per CUDA version."""


def check_run(
    config: RunConfig,
    registry: Registry,
    model_type: str | None = None,
    device: str | None = None,
    *,
    devices: Mapping[str, int] | None = None,
    train_only: bool = False,
    model: Mapping[str, Any] | None = None,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    table: Sequence[Role] | None = None,
) -> list[Problem]:
    """Everything that keeps this configuration from running with what is installed.

    Imports the functions that the configuration names (so that their options can be checked), but no engine.

    Args:
        config: the run.
        registry: what is installed.
        model_type: of the policy's `config.json`; None: not checked.
        device: `cpu` or `cuda`, what `placement.device: auto` came out as; None: not checked where it is auto.
        devices: number of devices that each role gets; None: as far as `placement` itself says.
        train_only: nothing is sampled (`rlsdk sft`, `reward-model`, `dpo`): rollout, rewards and algorithm are not
            looked at; the actor has to write the model that these commands leave.
        model: fields of the policy's `config.json`, as far as they are known.
        models: the same of the other models, by role.
        table: the roles; None: those that a run of `rlsdk train`, or with `train_only` of `rlsdk sft`, needs.
    """
    if table is None:
        config = with_dtype(config, device)
        table = roles(config, needed=needed_roles(config, train_only=train_only))
    found = [*_missing_data(config)]
    policy = dict(model or {}) | ({"model_type": model_type} if model_type is not None else {})
    for role in table:
        own = role.model.path == (config.model.path or "")
        fields = policy if own else (models or {}).get(role.name, {})
        count = devices_of(config.placement, role.name) if devices is None else devices.get(role.name)
        found += _role_problems(config, role, registry, fields, device, count, leaves_model=train_only)
        found += [] if train_only else context_problems(config, role, fields)
    if not train_only:
        found += [
            *_missing_rewards(config),
            *_transport(config, device),
            *_log_prob_kind(config, registry),
            *_components(config, registry),
            *_schedule(config, registry),
            *watch_problems(config, reported_in_rl(config)),
        ]
    found += _listeners(config, registry)
    return list(dict.fromkeys(found))  # Roles that share a section share its problems.


def _role_problems(
    config: RunConfig,
    role: Role,
    registry: Registry,
    model: Mapping[str, Any],
    device: str | None,
    count: int | None,
    *,
    leaves_model: bool,
) -> Iterator[Problem]:
    """What keeps one role from running on so many devices."""
    if role.is_rollout and count is not None and count % role.devices_per_rank:
        yield Problem(
            role.fields["tp_size"],
            f"{role.devices_per_rank}: expected a divisor of the {count} devices of the {role.name}",
        )
    kind = model.get("model_type")
    model_type = None if kind is None else str(kind)
    needed = role_requirements(config, role, model_type, device, count or 1, leaves_model=leaves_model)
    yield from check_backend(needed, role.backend, registry, field=role.fields["backend"])
    yield from missing_head(role, model)
    if role.model.adapter is not None and role.model.head is not Head.LM:
        yield Problem(
            "model.lora.rank",
            f"{role.model.adapter.rank}: the model gets a {role.model.head.value} head, which is new and no part of an "
            "adapter; leave model.lora out to train all weights",
        )
    yield from _options(needed, role, registry, model)


def missing_head(role: Role, model: Mapping[str, Any]) -> Iterator[Problem]:
    """A frozen model with a head of numbers that its folder does not have: they would be random."""
    named = [str(name) for name in model.get("architectures") or ()]
    if role.model.head is Head.LM or role.is_trained or not named or any(name.endswith(SCORING) for name in named):
        return
    yield Problem(
        role.fields["path"],
        f"{role.model.path!r} is a {' and '.join(named)}, which gives no score: expected an architecture that ends in "
        f"{' or '.join(SCORING)}",
    )


def check_backend(needed: Requirements, name: str, registry: Registry, *, field: str | None = None) -> list[Problem]:
    """Problems of a backend with these requirements, each at the field that causes the requirement.

    Args:
        needed: requirements of the role.
        name: name of the backend.
        registry: what is installed.
        field: field that names the backend; None: that of its kind.
    """
    field = field or f"{needed.kind}.backend"
    try:
        spec = registry.backend(needed.kind, name)
    except RlsdkError as error:
        return [Problem(field, str(error))]
    unexplained = replace(needed, because={})  # The problem's path already says which field asks.
    return [
        Problem(needed.because.get(lack.requirement, field), explain_lack(lack, unexplained, name, registry))
        for lack in lacks(needed, spec)
    ]


def _missing_data(config: RunConfig) -> Iterator[Problem]:
    if config.model.path is None:
        yield Problem("model.path", f"is required: {Setting('model.path', 'FOLDER')}, or a name on the hub")
    if config.data.train is None and not config.data.mixture:
        yield Problem(
            "data.train",
            f"is required: {Setting('data.train', 'FILE')}, or SOURCE:REST of a source in `rlsdk plugins list`",
        )


def _missing_rewards(config: RunConfig) -> Iterator[Problem]:
    maker = config.rollout.maker
    scores_itself = maker in ("environment", "agent") or (maker == "command" and config.gateway.agent_may_score)
    if not (config.rewards or config.reward_models or config.teachers or scores_itself):
        yield Problem("rewards", f"at least one is required: {Setting('rewards', 'NAME')}, or file.py:function")


def _transport(config: RunConfig, device: str | None) -> Iterator[Problem]:
    """Problems of transports that cannot work for any placement of ranks; the planner refuses the others."""
    chosen, placement = config.sharding.transport, config.placement
    given = placement.roles
    together = placement.preset == "colocate_all" or (given and given.get(ACTOR) == given.get(ROLLOUT))
    if chosen == "in_process" and not together:
        yield Problem(
            "sharding.transport",
            "'in_process': expected another, because placement gives actor and rollout processes of their own; "
            "auto takes the quickest that reaches",
        )
    if chosen == "nixl" and not any(map(find_spec, NIXL)):
        yield Problem(
            "sharding.transport",
            "'nixl' needs the package nixl here and in the environment of every worker; it is not installed: run "
            "`pip install 'rlsdk[nixl]'`, or choose another; auto takes the quickest that reaches",
        )
    kinds = {device_of(placement, role, device) for role in (ACTOR, ROLLOUT)}
    if chosen == "device_ring" and "cpu" in kinds:
        yield Problem(
            "sharding.transport",
            "'device_ring': expected another, because actor or rollout runs on a CPU; "
            "auto takes the quickest that reaches",
        )


def _options(needed: Requirements, role: Role, registry: Registry, model: Mapping[str, Any]) -> list[Problem]:
    if role.backend not in registry.usable(role.kind):
        return []  # Reported by `check_backend`.
    spec, prefix = registry.backend(role.kind, role.backend), role.fields["options"]
    try:
        if problems := options_problems(spec, role.options, registry, prefix=prefix):
            return problems
        options = backend_options(spec, role.options, registry)
    except RlsdkError as error:
        return [Problem(role.fields["backend"], str(error))]
    if not isinstance(options, ChecksPlace) or needed.device is None:
        return []
    found = options.place_problems(num_ranks=needed.num_ranks, device=needed.device, model=model)
    return [Problem(f"{prefix}.{option}", message) for option, message in found]


def _log_prob_kind(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Problems of rollout log-probs that are not comparable: they may not enter the loss, nor be compared with the
    train engine's."""
    if config.rollout.backend not in registry.usable(BackendKind.ROLLOUT):
        return
    spec = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    why = differing_settings(spec.log_prob_kind, config.rollout)
    if not why:
        return
    said = f"rollout backend {spec.name!r} gives log-probs {spec.log_prob_kind.value!r}, which differ with {why}"
    choice, correction = config.algorithm.old_log_probs, config.algorithm.correction
    compared = _old_log_probs(config, comparable=False).compared
    stale = f" with `{Setting('schedule.uncorrected', True)}`" if config.schedule.overlaps else ""
    if "old_log_probs" in compared:
        yield Problem("algorithm.old_log_probs", f"{choice!r}: {said}; change that, or use 'always'{stale}")
    if "correction" in compared:
        field = "mode" if correction.mode != "none" else "reject"
        yield Problem(f"algorithm.correction.{field}", f"{getattr(correction, field)!r}: {said}; use 'none'{stale}")
    if config.trainer.parity_action == "error":
        yield Problem("trainer.parity_action", f"'error': {said}; use 'warn'")


def _old_log_probs(config: RunConfig, *, comparable: bool) -> OldLogProbs:
    """The log-probs in the ratio of a step in full swing."""
    updates = config.trainer.updates_per_step * config.trainer.epochs_per_step
    stale = config.schedule.overlaps
    return choose_old_log_probs(config.algorithm, stale=stale, num_updates=updates, comparable=comparable)


def _components(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    algorithm = config.algorithm
    yield from _algorithm(registry, algorithm.name, algorithm.options)
    yield from _function(
        registry, ComponentKind.ADVANTAGE, "algorithm.advantage", algorithm.advantage, algorithm.advantage_options
    )
    yield from _function(registry, ComponentKind.LOSS, "algorithm.loss", algorithm.loss, algorithm.loss_options)
    aggregation = algorithm.loss_aggregation
    yield from _function(registry, ComponentKind.AGGREGATION, "algorithm.loss_aggregation", aggregation, {})
    yield from _function(registry, ComponentKind.KL_ESTIMATOR, "algorithm.kl_estimator", algorithm.kl_estimator, {})
    reward_kl = algorithm.kl_reward_estimator
    yield from _function(registry, ComponentKind.KL_ESTIMATOR, "algorithm.kl_reward_estimator", reward_kl, {})
    for index, reward in enumerate(config.rewards):
        if ":" not in reward.name and reward.judge is None:
            yield from _function(registry, ComponentKind.REWARD, f"rewards.{index}.name", reward.name, reward.options)
    for name, part in config.eval.sets.items():
        for index, reward in enumerate(part.rewards):
            if ":" not in reward.name and reward.judge is None:
                path = f"eval.sets.{name}.rewards.{index}.name"
                yield from _function(registry, ComponentKind.REWARD, path, reward.name, reward.options)
    rollout = config.rollout
    yield from _function(
        registry, ComponentKind.ROLLOUTER, "rollout.rollouter", rollout.rollouter, rollout.rollouter_options
    )
    if rollout.rollouter == SINGLE_TURN and rollout.rollouter_options:
        options = shown(dict(rollout.rollouter_options))
        yield Problem("rollout.rollouter_options", f"{options}: rollouter {SINGLE_TURN!r} has no options")
    yield from agent_problems(rollout)
    if config.sharding.manager != "auto":
        yield from _registered(registry, ComponentKind.SHARDING_MANAGER, "sharding.manager", config.sharding.manager)


def _listeners(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Problems of trackers and callbacks, which every kind of training has."""
    for name in config.tracking.trackers:
        yield from _registered(registry, ComponentKind.TRACKER, "tracking.trackers", name)
    for name, options in config.tracking.options.items():
        yield from _of_tracker(registry, name, options)
    for name in config.trainer.callbacks:
        yield from _function(registry, ComponentKind.CALLBACK, "trainer.callbacks", name, {})


def _of_tracker(registry: Registry, name: str, options: Options) -> Iterator[Problem]:
    """Options that a tracker does not read, if it says which it reads."""
    try:
        known = getattr(registry.component(ComponentKind.TRACKER, name), "option_names", None)
    except RlsdkError:
        return  # Reported by `_registered`.
    for option, value in options.items():
        if known is not None and option not in known:
            path = f"tracking.options.{name}.{option}"
            none = Problem(path, f"tracker {name!r} has no options", value=value)
            yield unknown_key(path, option, known, value) if known else none


def _algorithm(registry: Registry, name: str, options: Options) -> Iterator[Problem]:
    """Problems of the algorithm: it must be a complete subclass of `Algorithm`; only your own can have options."""
    if options and name == POLICY_GRADIENT:
        yield Problem("algorithm.options", f"{name!r} has none; its parts are the fields beside it", value=options)
    if registry.is_own(ComponentKind.ALGORITHM, name):
        return
    try:
        found = registry.function(ComponentKind.ALGORITHM, name)
    except RlsdkError as error:
        yield Problem("algorithm.name", str(error))
        return
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        yield Problem("algorithm.name", f"{name!r} is {found!r}: expected a subclass of rlsdk.interfaces.Algorithm")
        return
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        yield Problem("algorithm.name", f"{name!r}: {found.__qualname__} lacks {missing}")
    if odd := sorted({*found.roles} - {*OPTIONAL_ROLES}):
        known = sorted(OPTIONAL_ROLES)
        yield Problem("algorithm.name", f"{name!r} asks for the roles {odd}: expected some of {known}")


def _schedule(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Problems of the rollout backend with this schedule."""
    schedule, name = config.schedule, config.rollout.backend
    if not schedule.overlaps or name not in registry.usable(BackendKind.ROLLOUT):
        return
    spec = registry.backend(BackendKind.ROLLOUT, name)
    can = spec.capabilities
    if schedule.on_new_weights != "drain" and config.model.lora.sync == "adapter":
        yield Problem(
            "schedule.on_new_weights",
            f"{schedule.on_new_weights!r} has no effect with model.lora.sync 'adapter': a sample finishes under the "
            "adapter that it began with. Use 'drain', or model.lora.sync 'merged'",
        )
    if schedule.on_new_weights == "recompute" and not can & {Capability.PARTIAL_ROLLOUT, Capability.ABORT}:
        yield Problem(
            "schedule.on_new_weights",
            f"'recompute' needs a rollout backend that pauses or aborts what runs; {name!r} claims neither "
            "'partial_rollout' nor 'abort'. Use 'drain'",
        )
    if schedule.on_new_weights == "keep" and not {Capability.PARTIAL_ROLLOUT, Capability.STALE_CACHE} <= can:
        yield Problem(
            "schedule.on_new_weights",
            f"'keep' needs a rollout backend that continues with a KV cache of older weights; {name!r} does not "
            "claim 'stale_cache'. Use 'recompute'",
        )
    yield from _stale_samples(config, registry, spec.log_prob_kind)


def _stale_samples(config: RunConfig, registry: Registry, kind: LogProbKind) -> Iterator[Problem]:
    """Stale samples need a correction or `schedule.uncorrected`, which is refused if it has no effect."""
    algorithm, schedule = config.algorithm, config.schedule
    choice, at = algorithm.old_log_probs, f"at schedule.max_staleness {schedule.max_staleness}"
    differs = differing_settings(kind, config.rollout)
    old = _old_log_probs(config, comparable=not differs)
    has_no_ratio = (
        old.source == "rollout"
        and not differs  # reported by itself
        and algorithm.name == POLICY_GRADIENT
        and _ignores_ratio(registry, algorithm.loss)
    )
    if choice == "auto" and not old.accounts_for_sampler and not schedule.uncorrected:
        yield Problem(
            "schedule.max_staleness",
            f"{schedule.max_staleness} needs a correction of stale samples, but rollout backend "
            f"{config.rollout.backend!r} gives log-probs {kind.value!r}, which differ with {differs}; change that, or "
            f"say `{Setting('schedule.uncorrected', True)}`",
        )
    if has_no_ratio and not schedule.uncorrected:
        yield Problem(
            "algorithm.old_log_probs",
            f"'rollout' corrects nothing {at}: algorithm.loss {algorithm.loss!r} has no ratio. Choose 'auto' or "
            f"'decoupled', or say `{Setting('schedule.uncorrected', True)}`",
        )
    naive = not old.accounts_for_sampler or has_no_ratio
    if schedule.uncorrected and not naive and not algorithm.correction.is_on and algorithm.name == POLICY_GRADIENT:
        how = "puts the sampler's log-probs in the ratio" if old.source == "rollout" else "corrects stale samples"
        yield Problem(
            "schedule.uncorrected",
            f"True has no effect, because algorithm.old_log_probs {choice!r} {how}. Leave it out; to train without a "
            f"correction, add `{Setting('algorithm.old_log_probs', 'always')}`",
        )


def _ignores_ratio(registry: Registry, loss: str) -> bool:
    """Whether this loss does not read `old_log_probs`. False for an unknown loss, which `_components` reports."""
    try:
        return bool(getattr(registry.function(ComponentKind.LOSS, loss), "on_policy_only", False))
    except RlsdkError:
        return False


def _registered(registry: Registry, kind: ComponentKind, path: str, name: str) -> Iterator[Problem]:
    try:
        registry.row(kind, name)
    except RlsdkError as error:
        yield Problem(path, str(error))


def _function(registry: Registry, kind: ComponentKind, path: str, name: str, options: Options) -> Iterator[Problem]:
    """Problems of a function and its options: options must be keyword parameters of it, of their types. Rewards are
    always imported, as some need packages of their own."""
    if not options and kind is not ComponentKind.REWARD and registry.is_own(kind, name):
        return
    try:
        function = registry.function(kind, name)
    except RlsdkError as error:
        yield Problem(path, str(error))
        return
    prefix = path.removesuffix(".name") + ("_options" if kind is not ComponentKind.REWARD else ".options")
    for problem in option_problems(function, options):
        yield replace(problem, path=f"{prefix}.{problem.path}")
