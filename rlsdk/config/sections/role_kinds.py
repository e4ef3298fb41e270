"""The kinds of roles that a run may have: one record each, and the names made of them. A new role is a record here, and
its section in the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlsdk.interfaces import BackendKind, Head


@dataclass(frozen=True, kw_only=True)
class RoleKind:
    """One kind of role."""

    name: str
    engine: BackendKind
    """Kind of its engine. A teacher may ask for a rollout engine in its section; it does not sample then."""
    head: Head = Head.LM
    section: str
    """Section of the configuration with its fields; of a kind with several roles, the list that has one item each."""
    needed_by: str = ""
    """Field of the configuration that asks for it where it is true; an algorithm may ask for the role, too."""
    output: str = ""
    """What it computes for every row of a step, without gradient; empty: nothing, unless an algorithm asks."""
    fills: str = ""
    """Field of the batch that gets this output; `scores` are added to it. Of several roles of a kind: `FIELD.NAME`."""
    is_trained: bool = False
    """Whether it has an optimizer in reinforcement learning; otherwise it is frozen, or a rollout engine."""
    is_required: bool = False
    """Whether every run of reinforcement learning has it; a placement by pools must list it."""
    has_names: bool = False
    """Whether a run may have several, `KIND.NAME`."""
    starts_as_policy: bool = False
    """Whether, without a path of its own, it is the policy at the start of reinforcement learning."""
    with_fields: tuple[str, ...] = ()
    """Fields outside its section that are read only if the role is needed."""
    unneeded: str = ""
    """Why its section is not read where the role is not needed, with fields of `{algorithm}`."""

    def field_of(self, role: str) -> str:
        """Field of the batch that gets the output of the role of this name."""
        own = role.removeprefix(self.name) if self.has_names and self.output != "scores" else ""
        return f"{self.fills}{own}"

    @property
    def is_optional(self) -> bool:
        """Whether an algorithm may ask for it."""
        return not self.is_required and not self.has_names


ACTOR = "actor"
"""The policy that is trained."""
ROLLOUT = "rollout"
"""The rollout engine, which samples from the policy."""
REF = "ref"
CRITIC = "critic"
REWARD = "reward"
JUDGE = "judge"
TEACHER = "teacher"

ROLE_KINDS = (
    RoleKind(name=ACTOR, engine=BackendKind.TRAIN, section="train", is_trained=True, is_required=True),
    RoleKind(name=ROLLOUT, engine=BackendKind.ROLLOUT, section="rollout", is_required=True),
    # The frozen reference policy of the KL.
    RoleKind(
        name=REF,
        engine=BackendKind.TRAIN,
        section="ref",
        needed_by="algorithm.kl_coef",
        output="log_probs",
        fills="ref_log_probs",
        starts_as_policy=True,
        unneeded="algorithm.kl_coef is 0, so that no reference is loaded",
    ),
    # Estimates values; trained with the policy.
    RoleKind(
        name=CRITIC,
        engine=BackendKind.TRAIN,
        head=Head.VALUE,
        section="critic",
        needed_by="needs_values",
        output="values",
        fills="values",
        is_trained=True,
        with_fields=("algorithm.value_clip",),
        unneeded="algorithm.advantage {algorithm.advantage!r} needs no critic",
    ),
    # Reward models.
    RoleKind(
        name=REWARD,
        engine=BackendKind.TRAIN,
        head=Head.SCORE,
        section="reward_models",
        output="scores",
        fills="scores",
        has_names=True,
    ),
    # Frozen models that the policy learns from on its own samples.
    RoleKind(
        name=TEACHER,
        engine=BackendKind.TRAIN,
        section="teachers",
        output="log_probs",
        fills="teacher_log_probs",
        has_names=True,
    ),
    # Rollout engines with their own weights that judge responses.
    RoleKind(name=JUDGE, engine=BackendKind.ROLLOUT, section="rewards", has_names=True),
)
"""In the order in which they get devices."""
ROLES = tuple(kind.name for kind in ROLE_KINDS)
REQUIRED_ROLES = tuple(kind.name for kind in ROLE_KINDS if kind.is_required)
OPTIONAL_ROLES = tuple(kind.name for kind in ROLE_KINDS if kind.is_optional)
"""Roles that an algorithm may ask for."""
TRAINED_ROLES = tuple(kind.name for kind in ROLE_KINDS if kind.is_trained)
OWN_SECTIONS = {kind.section: kind.engine for kind in ROLE_KINDS if not kind.has_names}
"""Sections that may choose a backend, and its kind. A section without a backend uses that of its kind."""

if TYPE_CHECKING:
    OptionalRole = str
else:
    OptionalRole = Literal[OPTIONAL_ROLES]


def kind_of(name: str) -> RoleKind:
    """The record of a role."""
    return next(kind for kind in ROLE_KINDS if kind.name == base_role(name))


def filled_by(field: str) -> Iterator[str]:
    """The optional roles that compute this field of the batch."""
    return (kind.name for kind in ROLE_KINDS if kind.is_optional and kind.fills == field)


def is_role(name: str) -> bool:
    """Whether this is the name of a role, including `reward.NAME`, `teacher.NAME` and `judge.LABEL`."""
    base, _, own = name.partition(".")
    return name in ROLES or (own != "" and base in ROLES and kind_of(base).has_names)


def reward_role(name: str | None) -> str:
    """Role of the reward model of this name."""
    return REWARD if name is None else f"{REWARD}.{name}"


def judge_role(label: str | None) -> str:
    """Role of the judge of this label."""
    return JUDGE if label is None else f"{JUDGE}.{label}"


def teacher_role(name: str | None) -> str:
    """Role of the teacher of this name."""
    return TEACHER if name is None else f"{TEACHER}.{name}"


def base_role(name: str) -> str:
    """`reward` of `reward.NAME`, `judge` of `judge.LABEL`; every other role is its own."""
    return name.partition(".")[0]
