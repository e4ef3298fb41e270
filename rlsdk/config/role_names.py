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
ROLES = (ACTOR, ROLLOUT, REF, CRITIC, REWARD)
"""In the order in which devices are dealt out."""
REQUIRED_ROLES = (ACTOR, ROLLOUT)
"""What a placement by pools must give a place."""


def is_role(name: str) -> bool:
    """True for a role's name, that of one reward model included."""
    return name in ROLES or (name.startswith(f"{REWARD}.") and len(name) > len(REWARD) + 1)


def reward_role(name: str | None) -> str:
    """Role of the reward model of this name."""
    return REWARD if name is None else f"{REWARD}.{name}"


def base_role(name: str) -> str:
    """`reward` of `reward.NAME`; every other role is its own."""
    return name.partition(".")[0]
