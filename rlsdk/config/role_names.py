"""The names of the roles: the one place that spells them."""

from __future__ import annotations

ACTOR = "actor"
"""The policy that is trained."""
ROLLOUT = "rollout"
"""What samples from the policy."""
REF = "ref"
"""The frozen policy that the KL is measured from."""
CRITIC = "critic"
"""What estimates values."""
REWARD = "reward"
"""A reward model; with a name, `reward.NAME`."""
JUDGE = "judge"
"""A rollout engine with its own weights, that is asked about responses; with a label, `judge.LABEL`."""
ROLES = (ACTOR, ROLLOUT, REF, CRITIC, REWARD, JUDGE)
"""In the order in which devices are dealt out."""
REQUIRED_ROLES = (ACTOR, ROLLOUT)
"""What a placement by pools must give a place."""


def is_role(name: str) -> bool:
    """True for a role's name, that of one reward model or judge included."""
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
