"""What a configuration asks of the installed plugins, checked before a device is taken."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlsdk.config.base import Options
from rlsdk.config.engines import PlacementConfig, RolloutConfig
from rlsdk.config.explain import shown, unknown_key
from rlsdk.config.options import backend_options, options_problems
from rlsdk.config.problem import Problem
from rlsdk.config.schema import RunConfig
from rlsdk.interfaces import BackendKind, Capability, ChecksPlace, LogProbKind, RlsdkError
from rlsdk.registry import ComponentKind, Registry, Requirements, explain_lack, lacks


def check_run(
    config: RunConfig,
    registry: Registry,
    model_type: str | None = None,
    device: str | None = None,
    *,
    devices: Mapping[str, int] | None = None,
    train_only: bool = False,
    model: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Everything that keeps this configuration from running with what is installed.

    Imports the functions that the configuration names (so that their options can be checked), but no engine.

    Args:
        config: the run.
        registry: what is installed.
        model_type: of the model's `config.json`; None: not checked.
        device: `cpu` or `cuda`, what `placement.device: auto` came out as; None: not checked where it is auto.
        devices: number of devices that each role gets; None: as far as `placement` itself says.
        train_only: nothing is sampled (`rlsdk sft`): rollout, rewards and algorithm are not looked at.
        model: fields of the model's `config.json`, as far as they are known.
    """
    devices = declared_devices(config.placement) if devices is None else devices
    needed = train_requirements(config, model_type, device, devices)
    train = [
        *_missing_data(config),
        *check_backend(needed, config.train.backend, registry),
        *_options(needed, config.train.backend, config.train.options, registry, model or {}),
    ]
    if train_only:
        return train
    needed = rollout_requirements(config, model_type, device)
    return [
        *train,
        *_missing_rollout(config, devices.get("rollout")),
        *check_backend(needed, config.rollout.backend, registry),
        *_options(needed, config.rollout.backend, config.rollout.options, registry, model or {}),
        *_transport(config, device),
        *_log_prob_kind(config, registry),
        *_components(config, registry),
    ]


def check_backend(needed: Requirements, name: str, registry: Registry) -> list[Problem]:
    """What is wrong with a backend for these needs; each problem stands at the field that asks."""
    try:
        spec = registry.backend(needed.kind, name)
    except RlsdkError as error:
        return [Problem(f"{needed.kind}.backend", str(error))]
    unexplained = replace(needed, because={})  # The problem's path already says which field asks.
    return [
        Problem(
            needed.because.get(lack.requirement, f"{needed.kind}.backend"),
            explain_lack(lack, unexplained, name, registry),
        )
        for lack in lacks(needed, spec)
    ]


def train_requirements(
    config: RunConfig, model_type: str | None, device: str | None, devices: Mapping[str, int]
) -> Requirements:
    """What the run needs of its train backend; `devices` by role."""
    capabilities = {Capability.ENTROPY: "algorithm.entropy_coef"} if config.algorithm.entropy_coef else {}
    return _requirements(BackendKind.TRAIN, config, model_type, device, devices.get("actor", 1), capabilities)


def rollout_requirements(config: RunConfig, model_type: str | None, device: str | None) -> Requirements:
    """What the run needs of its rollout backend."""
    rollout = config.rollout
    asked = {
        Capability.MIN_P: ("rollout.min_p", rollout.min_p > 0),
        Capability.STOP_STRINGS: ("rollout.stop_strings", bool(rollout.stop_strings)),
        Capability.TENSOR_PARALLEL: ("rollout.tp_size", rollout.tp_size > 1),
    }
    capabilities = {capability: field for capability, (field, needed) in asked.items() if needed}
    needed = _requirements(BackendKind.ROLLOUT, config, model_type, device, rollout.tp_size, capabilities)
    return replace(needed, takes_weights=True)


def declared_devices(placement: PlacementConfig) -> dict[str, int]:
    """Devices of each role, as far as the configuration says it without dealing any out."""
    if placement.preset is None:
        return {role: sum(placement.pools[pool].devices_per_node) for role, pool in placement.roles.items()}
    total = placement.num_nodes * placement.devices_per_node
    return {"actor": total, "rollout": total} if placement.preset == "colocate_all" else {}


def _device_of(placement: PlacementConfig, role: str, device: str | None) -> str | None:
    """What a role runs on: its pool's own device, the placement's, or what `auto` came out as."""
    pool = next((placement.pools[pool] for name, pool in placement.roles.items() if name == role), None)
    if pool is not None and pool.device != "auto":
        return pool.device
    return device if placement.device == "auto" else placement.device


def _requirements(
    kind: BackendKind,
    config: RunConfig,
    model_type: str | None,
    device: str | None,
    num_ranks: int,
    capabilities: Mapping[Capability, str],
) -> Requirements:
    role = "rollout" if kind is BackendKind.ROLLOUT else "actor"
    devices = "placement.pools" if config.placement.preset is None else "placement.devices_per_node"
    sizes = "rollout.tp_size" if kind is BackendKind.ROLLOUT else devices
    because = {"device": "placement.device", "dtype": "model.dtype", "model_type": "model.path", "num_ranks": sizes}
    return Requirements(
        kind=kind,
        device=_device_of(config.placement, role, device),
        dtype=config.model.dtype,
        model_type=model_type,
        num_ranks=num_ranks,
        capabilities=frozenset(capabilities),
        because=because | {capability.value: field for capability, field in capabilities.items()},
    )


def _missing_data(config: RunConfig) -> Iterator[Problem]:
    if config.model.path is None:
        yield Problem("model.path", "is required: --model FOLDER, or a name on the hub")
    if config.data.train is None and not config.data.mixture:
        yield Problem("data.train", "is required: --data FILE, or SOURCE:REST such as reasoning_gym:chain_sum")


def _missing_rollout(config: RunConfig, devices: int | None) -> Iterator[Problem]:
    if not config.rewards:
        yield Problem("rewards", "at least one is required: --reward NAME, or file.py:function")
    tp_size = config.rollout.tp_size
    if devices is not None and devices % tp_size:
        yield Problem("rollout.tp_size", f"{tp_size}: expected a divisor of the {devices} devices of the rollout")


def _transport(config: RunConfig, device: str | None) -> Iterator[Problem]:
    """Ways for weights that cannot reach, wherever the ranks come to stand; the planner refuses the others."""
    chosen, placement = config.sharding.transport, config.placement
    roles = placement.roles
    together = placement.preset == "colocate_all" or (roles and roles.get("actor") == roles.get("rollout"))
    if chosen == "in_process" and not together:
        yield Problem(
            "sharding.transport",
            "'in_process': expected another, because placement gives actor and rollout processes of their own; "
            "auto takes the quickest that reaches",
        )
    kinds = {_device_of(placement, role, device) for role in ("actor", "rollout")}
    if chosen == "cuda_ipc" and "cpu" in kinds:
        yield Problem(
            "sharding.transport",
            "'cuda_ipc': expected another, because actor or rollout runs on a CPU; "
            "auto takes the quickest that reaches",
        )


def _options(
    needed: Requirements, name: str, raw: Options, registry: Registry, model: Mapping[str, Any]
) -> list[Problem]:
    kind = needed.kind
    if name not in registry.usable(kind):
        return []  # Reported by `check_backend`.
    spec = registry.backend(kind, name)
    try:
        if problems := options_problems(spec, raw, registry):
            return problems
        options = backend_options(spec, raw, registry)
    except RlsdkError as error:
        return [Problem(f"{kind}.backend", str(error))]
    if not isinstance(options, ChecksPlace) or needed.device is None:
        return []
    found = options.place_problems(num_ranks=needed.num_ranks, device=needed.device, model=model)
    return [Problem(f"{kind}.{name}.{option}", message) for option, message in found]


def _log_prob_kind(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    """Rollout log-probs that mean something else may not enter the loss, nor be held against the train engine's."""
    if config.rollout.backend not in registry.usable(BackendKind.ROLLOUT):
        return
    spec = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    why = _differs(spec.log_prob_kind, config.rollout)
    if not why:
        return
    said = f"rollout backend {spec.name!r} gives log-probs {spec.log_prob_kind.value!r}, which differ with {why}"
    if config.algorithm.old_log_probs == "rollout":
        yield Problem("algorithm.old_log_probs", f"'rollout': {said}; use 'always'")
    if config.trainer.parity_action == "error":
        yield Problem("trainer.parity_action", f"'error': {said}; use 'warn'")


def _differs(kind: LogProbKind, rollout: RolloutConfig) -> str:
    """The settings under which log-probs of this kind are not those of the contract; empty when they are."""
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    if kind is LogProbKind.RAW and rollout.temperature != 1:
        return f"rollout.temperature {rollout.temperature}"
    if kind is LogProbKind.PROCESSED and any(cuts.values()):
        return " and ".join(f"rollout.{name} {getattr(rollout, name)}" for name, cut in cuts.items() if cut)
    return ""


def _components(config: RunConfig, registry: Registry) -> Iterator[Problem]:
    algorithm = config.algorithm
    yield from _function(
        registry, ComponentKind.ADVANTAGE, "algorithm.advantage", algorithm.advantage, algorithm.advantage_options
    )
    yield from _function(registry, ComponentKind.LOSS, "algorithm.loss", algorithm.loss, algorithm.loss_options)
    for index, reward in enumerate(config.rewards):
        if ":" not in reward.name:
            yield from _function(registry, ComponentKind.REWARD, f"rewards.{index}.name", reward.name, reward.options)
    named = {
        ComponentKind.TRACKER: ("tracking.trackers", config.tracking.trackers),
    }
    for kind, (path, names) in named.items():
        for name in names:
            yield from _registered(registry, kind, path, name)
    for name in config.trainer.callbacks:
        yield from _function(registry, ComponentKind.CALLBACK, "trainer.callbacks", name, {})
    if config.sharding.manager != "auto":
        yield from _registered(registry, ComponentKind.SHARDING_MANAGER, "sharding.manager", config.sharding.manager)


def _registered(registry: Registry, kind: ComponentKind, path: str, name: str) -> Iterator[Problem]:
    try:
        registry.row(kind, name)
    except RlsdkError as error:
        yield Problem(path, str(error))


def _function(registry: Registry, kind: ComponentKind, path: str, name: str, options: Options) -> Iterator[Problem]:
    """Looks a function up, and its options among its keyword parameters: one that it does not take is an error."""
    try:
        known = keyword_parameters(registry.function(kind, name))
    except RlsdkError as error:
        yield Problem(path, str(error))
        return
    prefix = path.removesuffix(".name") + ("_options" if kind is not ComponentKind.REWARD else ".options")
    for option, value in options.items():
        if known is not None and option not in known:
            yield Problem(f"{prefix}.{option}", f"{shown(value)}: {unknown_key(option, sorted(known))}")


def keyword_parameters(function: Any) -> dict[str, inspect.Parameter] | None:
    """Keyword parameters after the first, positional one; None when it takes any, or has no signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name: p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
