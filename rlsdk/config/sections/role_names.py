"""The names of the roles, defined only here."""

from __future__ import annotations

ACTOR = "actor"
"""The policy that is trained."""
ROLLOUT = "rollout"
"""The rollout engine, which samples from the policy."""
REF = "ref"
"""The frozen reference policy of the KL."""
CRITIC = "critic"
"""The critic, which estimates values."""
REWARD = "reward"
"""A reward model; with a name, `reward.NAME`."""
JUDGE = "judge"
"""A rollout engine with its own weights that judges responses; with a label, `judge.LABEL`."""
ROLES = (ACTOR, ROLLOUT, REF, CRITIC, REWARD, JUDGE)
"""All roles, in the order in which they get devices."""
REQUIRED_ROLES = (ACTOR, ROLLOUT)
"""Roles that a placement by pools must list."""


def is_role(name: str) -> bool:
    """Whether this is the name of a role, including `reward.NAME` and `judge.LABEL`."""
    base, _, own = name.partition(".")
    return name in ROLES or (base in (REWARD, JUDGE) and own != "")


def reward_role(name: str | None) -> str:
    """Role of the reward model of this name."""
    return REWARD if name is None else f"{REWARD}.{name}"


def judge_role(label: str | None) -> str:
    """Role of the judge of this label."""
    return JUDGE if label is None else f"{JUDGE}.{label}"


def base_role(name: str) -> str:
    """`reward` of `reward.NAME`, `judge` of `judge.LABEL`; every other role is its own."""
    return name.partition(".")[0]
