"""Prepares a run: everything that can be refused before a process starts is refused here, and what starting, planning
and replaying take from the settings is decided. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsdk.cluster import PlacementSpec, count_gpus
from rlsdk.config import (
    Problem,
    Role,
    RunConfig,
    check_run,
    samples_by_version,
    with_adapter_sync,
    with_checkpointing,
    with_dtype,
)
from rlsdk.config.checks.context import context_tokens, fitted_lengths
from rlsdk.config.checks.findings import Findings
from rlsdk.config.checks.training import Training, table_of, training_problems
from rlsdk.config.checks.watched import reported_in_sft, reported_on_pairs, watch_problems
from rlsdk.config.loading.foreign_names import RATES
from rlsdk.interfaces import BackendKind, Capability
from rlsdk.kit.model.shapes import count_parameters
from rlsdk.registry import Registry
from rlsdk.system.processors import usable_processors
from rlsdk.trainer.checkpoints.run_folder import check_run_name
from rlsdk.trainer.inputs.environments import check_response_template, load_environment
from rlsdk.trainer.inputs.log_prob_files import log_prob_problems
from rlsdk.trainer.inputs.model_config import (
    chat_template_known,
    file_problems,
    model_fields,
    other_models,
    quantized_base,
)
from rlsdk.trainer.inputs.option_trials import refused_options
from rlsdk.trainer.inputs.reward_preflight import inspect_rewards
from rlsdk.trainer.inputs.sources import check_rows, source_checks
from rlsdk.trainer.inputs.teacher_tokenizers import tokenizer_problems
from rlsdk.trainer.learner.watch import rate_notices
from rlsdk.trainer.roles.placement import placed, placement_of, processors_of_device, resolve_device, role_devices

NO_FIELDS: Mapping[str, Any] = {}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a `config.json` that count a layer's experts."""
MADE = "made on the spot"
"""Path of the quickstart's model until it is made."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that was checked against what is installed."""

    training: Training
    config: RunConfig
    """The configuration; its dtype is decided."""
    registry: Registry
    device: str
    """`cpu` or `cuda`: value of `placement.device: auto`."""
    table: Sequence[Role]
    """The roles of the run, each with its pool."""
    placement: PlacementSpec
    """The pools of these roles and their devices."""
    makes_model: bool = False
    """Whether it is the quickstart, which creates its model."""
    notices: Sequence[str] = ()
    """Notices on how the settings were read."""

    @classmethod
    def of(cls, config: RunConfig, registry: Registry, device: str, training: Training = Training.RL) -> PreparedRun:
        """The run of a configuration that is not checked here.

        Args:
            config: the run's configuration.
            registry: what is installed.
            device: `cpu` or `cuda`, used if the placement does not name one.
            training: its kind.

        Raises:
            ConfigError: the placement has fewer devices than pools.
        """
        device = device if config.placement.device == "auto" else config.placement.device
        config = with_sync(with_dtype(config, device), registry, training)[0]
        table = table_of(training, config)
        placement = placement_of(config.placement, [role.name for role in table], device)
        return cls(
            training=training,
            config=config,
            registry=registry,
            device=device,
            table=placed(table, placement),
            placement=placement,
        )

    def with_config(self, config: RunConfig) -> PreparedRun:
        """The same run with other values: of files that were put into its folder, or a number of steps that follows
        from the data. The roles keep their pools."""
        if config == self.config:
            return self
        names = {role.name for role in self.table}
        table = [role for role in table_of(self.training, config) if role.name in names]
        return replace(self, config=config, table=placed(table, self.placement))

    def without(self, names: Collection[str]) -> PreparedRun:
        """The run without these roles; the other roles keep the devices that they have in the whole run."""
        roles = {role: pool for role, pool in self.placement.roles.items() if role not in names}
        pools = tuple(pool for pool in self.placement.pools if pool.name in roles.values())
        table = [role for role in self.table if role.name not in names]
        return replace(self, table=table, placement=replace(self.placement, pools=pools, roles=roles))


def prepare(
    config: RunConfig,
    registry: Registry,
    training: Training,
    found: Findings,
    *,
    device: str | None = None,
    makes_model: bool = False,
    loads_models: bool = True,
    notices: Sequence[str] = (),
) -> PreparedRun:
    """Checks everything of a run that can be checked before a process starts, and decides its dtype, roles and pools.

    Args:
        config: the configuration; for inspection only if `found` has problems.
        registry: what is installed.
        training: the kind of training.
        found: problems found so far.
        device: value of `placement.device: auto`; None: what this machine has.
        makes_model: it is the quickstart, which creates its model.
        loads_models: weights and tokenizers must exist, and not only each model's `config.json`.
        notices: on how the settings were read.

    Raises:
        ConfigError: lists all problems.
        DataError: a data file is missing.
    """
    if training is not Training.RL or device is None or config.placement.device != "auto":
        device = resolve_device(config.placement)
    config = with_dtype(config, device)

    def checks_of(config: RunConfig) -> _Checks:
        """The quickstart has no path of a model yet, which is no problem."""
        checked = with_model_path(config, MADE) if makes_model else config
        return _Checks(checked, registry, training, found, device)

    checks = checks_of(config)
    model = {"model_type": "llama"} if makes_model else checks.model()
    if (name := config.trainer.run_name) is not None:
        found.run_check(lambda: check_run_name(name), None)
    fitted, said = fitted_lengths(config, context_tokens(model))
    fitted, chosen = _chosen(fitted, model, device)
    fitted, synced = with_sync(fitted, registry, training, model)
    if fitted != config:
        config, checks = fitted, checks_of(fitted)
    if loads_models and not makes_model and model:
        checks.files()
    rates = [path for path in RATES if training.reader.reads(path, config)]
    notices = [*notices, *said, *chosen, *synced, *rate_notices(config, rates), *checks.data()]
    placement = checks.placement()
    notices = [*notices, *checks.engines(model, placement)]
    if found or placement is None:
        found.refuse()
    return PreparedRun(
        training=training,
        config=config,
        registry=registry,
        device=device,
        table=placed(checks.table, placement),
        placement=placement,
        makes_model=makes_model,
        notices=notices,
    )


def _chosen(config: RunConfig, model: Mapping[str, Any], device: str) -> tuple[RunConfig, list[str]]:
    """The configuration with settings decided by device and size of the model, and why; on a CPU without words, since
    none differs from a run's plainest form."""
    size = count_parameters(model)
    decided = with_checkpointing(config, device, size)
    if device != "cuda":
        return decided, []
    notices = []
    if config.train.activation_checkpointing == "auto":
        value = str(decided.train.activation_checkpointing).lower()
        known = "of unknown size" if size is None else f"of about {size / 1e9:.1f} billion parameters"
        notices.append(f"train.activation_checkpointing {value}: auto, for a model {known} on a GPU")
    if config.placement.cpus_per_device == "auto":
        number = processors_of_device(config.placement, device)
        why = f"{usable_processors()} processors of this machine shared by {count_gpus()} GPUs"
        if not count_gpus() or config.placement.ray_address is not None:
            why = "none of the run's GPUs is known to be on this machine"
        notices.append(f"placement.cpus_per_device {number}: auto, {why}")
    return decided, notices


def with_sync(
    config: RunConfig, registry: Registry, training: Training, model: Mapping[str, Any] = NO_FIELDS
) -> tuple[RunConfig, list[str]]:
    """The configuration with `model.lora.sync: auto` decided, and why.

    Args:
        config: of the run.
        registry: knows what the two backends can.
        training: the kind of training.
        model: `config.json` of the policy.
    """
    kinds = {BackendKind.TRAIN: config.train.backend, BackendKind.ROLLOUT: config.rollout.backend}
    known = all(name in registry.usable(kind) for kind, name in kinds.items())
    if training is not Training.RL or not known or not config.model.lora.rank or config.model.lora.sync != "auto":
        return config, []
    specs = [registry.backend(kind, name) for kind, name in kinds.items()]
    has_experts = any(isinstance(count := model.get(name), int) and count > 1 for name in EXPERTS)
    able = [frozenset[Capability]() if has_experts else spec.capabilities for spec in specs]
    decided = with_adapter_sync(config, able)
    if decided.model.lora.sync == "adapter":
        said = "model.lora.sync adapter: auto; syncs send the adapter alone, and the weights below it once"
        if samples_by_version(decided, specs[1].capabilities):
            said += (
                f"; the newest {decided.schedule.max_staleness + 1} versions of it are served side by side, and no "
                "sample waits for one that arrives"
            )
        return decided, [said]
    lacking = [spec for spec in specs if Capability.ADAPTER_SYNC not in spec.capabilities]
    names = " and ".join(f"{spec.kind} backend {spec.name!r}" for spec in lacking)
    why = f"{names} cannot do otherwise" if lacking else "running samples go on under new weights"
    if has_experts and not lacking:
        why = "not every engine starts with adapters beside experts; try model.lora.sync adapter"
    return decided, [f"model.lora.sync merged: auto; syncs send all weights with the adapter added, because {why}"]


class _Checks:
    """The checks of a run, each of which adds its problems to `found`."""

    def __init__(self, config: RunConfig, registry: Registry, training: Training, found: Findings, device: str) -> None:
        self.config = config
        self.registry = registry
        self.training = training
        self.found = found
        self.device = device
        nothing: Sequence[Role] = ()
        self.table = found.run_check(lambda: table_of(training, config), nothing)

    def model(self) -> Mapping[str, Any]:
        """`config.json` of the policy; empty: refused, or not named."""
        nothing: Mapping[str, Any] = {}
        return (
            nothing
            if self.found.names("model.path")
            else self.found.run_check(lambda: model_fields(self.config), nothing)
        )

    def files(self) -> None:
        """Weights, tokenizers and log-probs."""
        self.found.add(self.found.run_check(lambda: list(file_problems(self.config, self.table)), []))
        if self.training in (Training.RL, Training.DISTILL) and self.config.teachers:
            if damaged := list(log_prob_problems(self.config)):
                self.found.add(damaged)
            else:
                self.found.add(tokenizer_problems(self.config))

    def data(self) -> Sequence[str]:
        """The data; returns notices on the rows."""
        if self.found.names("data.train"):
            return ()
        are_there = [self.found.run_check(check, False) for check in source_checks(self.config, self.registry)]
        if not all(are_there):
            return ()
        own = self.training
        kinds = {"of_pairs": own.reads_pairs, "of_steps": own.reads_steps, "rewarded": own is Training.RL}
        kinds["taught"] = own in (Training.RL, Training.DISTILL)
        learned = own in (Training.SFT, Training.DISTILL, Training.KTO)
        has_template = chat_template_known(self.config) is not False
        return self.found.run_check(
            lambda: check_rows(self.config, self.registry, **kinds, learned=learned, has_template=has_template), ()
        )

    def placement(self) -> PlacementSpec | None:
        """The pools of the roles; None: refused."""
        if self.found.names("placement"):
            return None
        names = [role.name for role in self.table]
        return self.found.run_check(lambda: placement_of(self.config.placement, names, self.device), None)

    def engines(self, model: Mapping[str, Any], placement: PlacementSpec | None) -> Sequence[str]:
        """Engines and functions, with rewards and algorithm where samples are made; returns notices."""
        samples, found = self.training is Training.RL, self.found
        found.add([*training_problems(self.training, self.config), *quantized_base(self.config, model)])
        nothing: Mapping[str, Mapping[str, Any]] = {}
        others = samples or self.training is Training.DISTILL
        models = found.run_check(lambda: other_models(self.config, self.table), nothing) if others else nothing

        def problems() -> list[Problem]:
            return check_run(
                self.config,
                self.registry,
                model.get("model_type"),
                self.device,
                devices=None if placement is None else role_devices(placement),
                train_only=not samples,
                model=model,
                models=models,
                table=self.table,
            )

        found.add(found.run_check(problems, []))
        if not samples:
            kind = self.training.pairs
            reported = reported_in_sft() if kind is None else reported_on_pairs(self.config, kind)
            found.add(watch_problems(self.config, reported))
            return ()
        found.add(found.run_check(lambda: list(refused_options(self.config, self.registry)), []))
        if self.config.rollout.environment is not None:
            found.run_check(lambda: load_environment(self.config), None)
        found.run_check(lambda: check_response_template(self.config), None)
        refused, notices = inspect_rewards(self.config.rewards)
        found.add(refused)
        return notices


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    """The configuration with another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
