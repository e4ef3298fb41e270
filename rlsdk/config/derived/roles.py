"""The table of a run's roles and of what each is built from. All code that handles roles iterates it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlsdk.config.derived.specs import adapter_spec, model_spec, optim_spec
from rlsdk.config.sections.base import Options
from rlsdk.config.sections.rewards import JudgeEngineConfig, RewardConfig
from rlsdk.config.sections.role_kinds import (
    ACTOR,
    REWARD,
    ROLE_KINDS,
    ROLLOUT,
    TEACHER,
    RoleKind,
    judge_role,
    kind_of,
    reward_role,
    teacher_role,
)
from rlsdk.config.sections.role_sections import (
    ModelRoleConfig,
    RewardModelConfig,
    TeacherRolloutConfig,
    TrainedRoleConfig,
)
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import BackendKind, Capability, Head, ModelSpec, OptimSpec, RolloutSpec, TrainSpec
from rlsdk.interfaces.settings import PassLimits, ReplicaSize, TrainPasses, shared

HEAD_CAPABILITY = {Head.VALUE: Capability.VALUE_HEAD, Head.SCORE: Capability.SCORE_HEAD}
"""Capability that a backend needs for this head."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """One row of the table."""

    name: str
    kind: BackendKind
    backend: str
    """Name of a registered backend of this kind."""
    spec: TrainSpec | RolloutSpec
    """Specification of its engine, without the backend's own options."""
    options: Options = field(default_factory=dict)
    """The backend's own options, as written in the configuration."""
    devices_per_rank: int = 1
    """Devices per rank: all on one node, or all those of several nodes."""
    pool: str = ""
    """Name of its pool; empty until the run is placed."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration that set `backend`, `options`, `path` and `dtype`."""

    @property
    def model(self) -> ModelSpec:
        return self.spec.model

    @property
    def optim(self) -> OptimSpec | None:
        """None: frozen, or a rollout engine."""
        return self.spec.optim if isinstance(self.spec, TrainSpec) else None

    @property
    def is_trained(self) -> bool:
        """Whether it has an optimizer, so that a checkpoint must contain it."""
        return self.optim is not None

    @property
    def is_rollout(self) -> bool:
        """Whether its engine is a rollout engine: that of the policy, a judge's, or a teacher's."""
        return self.kind is BackendKind.ROLLOUT

    @property
    def has_own_weights(self) -> bool:
        """Whether it is a rollout engine with the weights of its own model, and gets none from the actor."""
        return self.is_rollout and self.name != ROLLOUT

    @property
    def is_sampling(self) -> bool:
        """Whether it works while the policy samples: its rollout engine, and judges. A teacher does afterwards."""
        return kind_of(self.name).engine is BackendKind.ROLLOUT

    @property
    def keeps_weights(self) -> bool:
        """Whether it is a rollout engine with weights that no sync restores: its own, or those below an adapter."""
        return self.has_own_weights or (self.is_rollout and self.model.adapter is not None)

    @property
    def starts_as_policy(self) -> bool:
        """Whether it is the policy at the start of reinforcement learning."""
        return kind_of(self.name).starts_as_policy and self.fields["path"] == "model.path"

    def with_model(self, path: str) -> Role:
        """A copy with the weights of another folder."""
        spec = replace(self.spec, model=replace(self.model, path=path, revision=None))
        return replace(self, spec=replace(spec, init_from_config=False) if isinstance(spec, TrainSpec) else spec)

    def loading_weights(self) -> Role:
        """A copy of this rollout role that loads its model's weights from disk and waits for no sync."""
        spec = self.spec
        assert isinstance(spec, RolloutSpec)
        return replace(self, spec=replace(spec, load_weights=True, model=replace(spec.model, adapter=None)))

    def with_optim(self, optim: OptimSpec) -> Role:
        """The same with another optimizer.

        Raises:
            TypeError: it is no role of a train backend.
        """
        if not isinstance(self.spec, TrainSpec):
            raise TypeError(f"role {self.name!r} is of a {self.kind} backend, which has no optimizer")
        return replace(self, spec=replace(self.spec, optim=optim))


def needed_roles(config: RunConfig, *, train_only: bool = False) -> tuple[str, ...]:
    """Names of the roles that a run needs, in the order in which they get devices."""
    if train_only:
        return (ACTOR,)
    return (
        *(kind.name for kind in ROLE_KINDS if not kind.has_names and _is_needed(kind, config)),
        *(reward_role(model.name) for model in config.reward_models),
        *(teacher_role(model.name) for model in config.teachers if model.has_engine),
        *(judge_role(reward.label) for _, reward in _judging(config)),
    )


def _is_needed(kind: RoleKind, config: RunConfig) -> bool:
    if kind.is_required or kind.name in config.algorithm.roles:
        return True
    return bool(kind.needed_by and functools.reduce(getattr, kind.needed_by.split("."), config))


def roles(config: RunConfig, *, needed: Sequence[str] | None = None) -> tuple[Role, ...]:
    """The table, in the order of `needed` (None: as `needed_roles`)."""
    names = needed_roles(config) if needed is None else needed
    named: dict[str, Role] = {}
    if any(kind_of(name).has_names for name in names):
        named = {role.name: role for role in (*_rewards(config), *_teachers(config), *_judges(config))}
    own = [name for name in names if not (kind_of(name).starts_as_policy and is_own_reference(config))]
    # Only the sections of roles that are needed are read.
    return tuple(named[name] if kind_of(name).has_names else _single(config, kind_of(name)) for name in own)


def is_own_reference(config: RunConfig) -> bool:
    """Whether the actor computes the reference's log-probs: with its adapter switched off, or replaced by a copy of it
    as it was when reinforcement learning began."""
    return config.model.lora.rank > 0 and config.ref.path is None


def _single(config: RunConfig, kind: RoleKind) -> Role:
    """The role of a kind that a run has once at most."""
    own = {ACTOR: actor_role, ROLLOUT: rollout_role}
    if kind.name in own:
        return own[kind.name](config)
    return _beside(config, kind, getattr(config, kind.section), kind.name, kind.section)


def own_sections(config: RunConfig) -> Iterator[tuple[str, ModelRoleConfig]]:
    """Name and content of each section of a model besides the actor that a run has once at most."""
    return ((kind.section, getattr(config, kind.section)) for kind in ROLE_KINDS if kind.is_optional)


def role_of(table: Sequence[Role], name: str) -> Role:
    """The row of that name."""
    return next(role for role in table if role.name == name)


def actor_role(config: RunConfig) -> Role:
    """The policy that is trained."""
    skipped = config.critic.warmup_steps if config.needs_values else 0
    steps = max(config.trainer.steps - skipped, 0) * config.trainer.updates_per_step * config.trainer.epochs_per_step
    model = replace(model_spec(config), adapter=adapter_spec(config))
    return _train_role(config, ACTOR, "train", model, optim_spec(config.train.optim, steps))


def rollout_role(config: RunConfig) -> Role:
    """The rollout engine; it gets its weights by the first sync."""
    rollout = config.rollout
    adapter = adapter_spec(config) if config.model.lora.sync == "adapter" else None
    return Role(
        name=ROLLOUT,
        kind=BackendKind.ROLLOUT,
        backend=rollout.backend,
        spec=RolloutSpec(
            model=replace(model_spec(config), adapter=adapter),
            max_model_tokens=config.max_model_tokens,
            max_running=rollout.max_running_samples,
            **shared(rollout, ReplicaSize),
            load_weights=False,
            adapter_versions=config.schedule.max_staleness + 1 if adapter is not None else 1,
            engine_kwargs=dict(rollout.engine_kwargs),
        ),
        options=rollout.options,
        devices_per_rank=rollout.num_devices,
        fields={
            "backend": "rollout.backend",
            "options": f"rollout.{rollout.backend}",
            "path": "model.path",
            "dtype": "model.dtype",
            "tp_size": "rollout.tp_size",
        },
    )


def _rewards(config: RunConfig) -> list[Role]:
    return [
        _beside(config, _reward_kind(model), model, reward_role(model.name), f"reward_models.{at}")
        for at, model in enumerate(config.reward_models)
    ]


def best_of_role(config: RunConfig) -> Role:
    """The process reward model of `eval.best_of`."""
    assert config.eval.best_of is not None
    kind = replace(kind_of(REWARD), head=Head.VALUE)
    return _beside(config, kind, config.eval.best_of, REWARD, "eval.best_of")


def _reward_kind(model: RewardModelConfig) -> RoleKind:
    kind = kind_of(REWARD)
    return kind if model.step_scores is None else replace(kind, head=Head.VALUE)


def _teachers(config: RunConfig) -> list[Role]:
    made = []
    for at, model in enumerate(config.teachers):
        name, section = teacher_role(model.name), f"teachers.{at}"
        if model.has_engine:
            beside = _beside(config, kind_of(TEACHER), model, name, section)
            made.append(beside if model.rollout is None else _served(config, beside, model.rollout, section))
    return made


def _served(config: RunConfig, beside: Role, own: TeacherRolloutConfig, section: str) -> Role:
    """A teacher in a rollout engine; `beside`: the same in a train engine."""
    longest = own.max_model_tokens or config.max_model_tokens + 1
    return _own_rollout(config, beside.name, beside.model, own, f"{section}.rollout", longest, beside.fields)


def _judging(config: RunConfig) -> list[tuple[int, RewardConfig]]:
    """Rewards whose judge is an engine of the run, with their indices."""
    return [(at, reward) for at, reward in enumerate(config.rewards) if reward.judge and reward.judge.engine]


def _judges(config: RunConfig) -> list[Role]:
    """The judges: rollout engines that load their own weights and get none from the actor."""
    found = []
    for at, reward in _judging(config):
        own = reward.judge.engine if reward.judge is not None else None
        assert own is not None
        model = replace(model_spec(config), path=own.path, revision=own.revision)
        model = replace(model, dtype=own.dtype or model.dtype)
        section = f"rewards.{at}.judge.engine"
        fields = {"path": f"{section}.path", "dtype": "model.dtype" if own.dtype is None else f"{section}.dtype"}
        name = judge_role(reward.label)
        found.append(_own_rollout(config, name, model, own, section, own.max_model_tokens, fields))
    return found


def _own_rollout(
    config: RunConfig,
    name: str,
    model: ModelSpec,
    own: JudgeEngineConfig | TeacherRolloutConfig,
    section: str,
    max_model_tokens: int,
    fields: Mapping[str, str],
) -> Role:
    """A rollout engine with weights of its own. Null fields are taken from `rollout`; `fields`: those of its model."""
    backend = own.backend or config.rollout.backend
    same = backend == config.rollout.backend
    kwargs = own.engine_kwargs if own.engine_kwargs is not None else config.rollout.engine_kwargs if same else {}
    return Role(
        name=name,
        kind=BackendKind.ROLLOUT,
        backend=backend,
        spec=RolloutSpec(
            model=model,
            max_model_tokens=max_model_tokens,
            max_running=own.max_running_samples,
            tp_size=own.tp_size,
            load_weights=True,
            engine_kwargs=dict(kwargs),
        ),
        options=own.options if own.options is not None else config.rollout.options if same else {},
        devices_per_rank=own.tp_size,
        fields={
            **fields,
            "backend": "rollout.backend" if own.backend is None else f"{section}.backend",
            "options": f"rollout.{backend}" if own.options is None else f"{section}.options",
            "tp_size": f"{section}.tp_size",
        },
    )


def _beside(config: RunConfig, kind: RoleKind, own: ModelRoleConfig, name: str, section: str) -> Role:
    """A role with its own section, whose null fields are taken from `train` and `model`."""
    model = model_spec(config) if own.path is None else replace(model_spec(config), path=own.path, revision=None)
    model = replace(model, head=kind.head, revision=own.revision or model.revision, dtype=own.dtype or model.dtype)
    trained = own if isinstance(own, TrainedRoleConfig) else None
    optim = None if trained is None else optim_spec(trained.optim, config.trainer.optimizer_steps)
    role = _train_role(config, name, section, model, optim)
    assert isinstance(role.spec, TrainSpec)
    spec = role.spec
    if trained is not None and trained.activation_checkpointing is not None:
        spec = replace(spec, activation_checkpointing=trained.activation_checkpointing)
    if own.path is not None:
        spec = replace(spec, init_from_config=False)
    limits = shared(own, PassLimits)
    if any(limits.values()):
        spec = replace(spec, **limits)
    backend = own.backend or config.train.backend
    same = backend == config.train.backend
    options = own.options if own.options is not None else config.train.options if same else {}
    kwargs = own.engine_kwargs if own.engine_kwargs is not None else config.train.engine_kwargs if same else {}
    return replace(
        role,
        backend=backend,
        spec=replace(spec, engine_kwargs=dict(kwargs)),
        options=options,
        fields={
            "backend": "train.backend" if own.backend is None else f"{section}.backend",
            "options": f"train.{backend}" if own.options is None else f"{section}.{_options_key(section, backend)}",
            "path": "model.path" if own.path is None else f"{section}.path",
            "dtype": "model.dtype" if own.dtype is None else f"{section}.dtype",
        },
    )


def _options_key(section: str, backend: str) -> str:
    """Path of options as the user writes it, `critic.BACKEND.OPTION`; list items have `options` only."""
    return "options" if "." in section else backend


def _train_role(config: RunConfig, name: str, section: str, model: ModelSpec, optim: OptimSpec | None) -> Role:
    train = config.train
    return Role(
        name=name,
        kind=BackendKind.TRAIN,
        backend=train.backend,
        spec=TrainSpec(
            model=model,
            optim=optim,
            **{**shared(train, TrainPasses), "activation_checkpointing": train.activation_checkpointing is True},
            init_from_config=config.model.init_from_config,
            engine_kwargs=dict(train.engine_kwargs),
        ),
        options=train.options,
        fields={
            "backend": f"{section}.backend",
            "options": f"{section}.{train.backend}",
            "path": "model.path",
            "dtype": "model.dtype",
        },
    )
