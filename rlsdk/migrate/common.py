"""What the three peers have in common: schedules of the learning rate, lengths, trackers, devices, rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsdk.config.sections.schema import NEEDS_GROUP
from rlsdk.interfaces import BackendKind
from rlsdk.migrate.draft import Draft, Fate, Unknown, here
from rlsdk.registry import FIRST_PARTY

SCHEDULES: Mapping[str, str] = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "",
}
"""Name of a schedule in transformers and verl -> ours; empty: none."""
TRACKERS = frozenset({"wandb", "tensorboard", "mlflow"})
"""Trackers of the same name here."""
SHARDED = next(iter(FIRST_PARTY[BackendKind.TRAIN]))
"""The train backend for several devices where the peer's engine has no counterpart here: the first of its kind."""
SAMPLER = next(iter(FIRST_PARTY[BackendKind.ROLLOUT]))
"""The rollout backend that the peer's command means where it names none: the first of its kind."""
SUPERVISED = ("sft", "distill")
"""Commands that train on answers."""
NO_LORA = (
    "no adapter of this kind: model.lora has rank, alpha, scaling and targets, for the policy of train, sft and dpo. "
    "Learning rates for adapters are about ten times too high where all weights are trained"
)
NO_DROPOUT = "adapters have no dropout here, so that log-probs of training are those of sampling"


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """A peer's names of an adapter's settings, and the values of those that a script leaves out."""

    rank: str
    alpha: str
    targets: str
    dropout: str
    usual_rank: int = 0
    usual_alpha: float = 16.0
    usual_dropout: float = 0.0
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The peer's name of a module -> names of those that it stands for in the model's own code."""


def put_adapter(draft: Draft, names: AdapterNames, *switches: str, scaling: str = "") -> None:
    """The adapter of the policy, if the script has one.

    Args:
        draft: of the script.
        names: of the settings.
        switches: names of settings that ask for an adapter.
        scaling: name of the setting that asks for a scale with the root of the rank.
    """
    rank = int(draft.value(names.rank, names.usual_rank) or 0)
    if here("lora_rank", draft.script.command) is None or not rank or not draft.gives(names.rank, *switches):
        return
    draft.put("model.lora.rank", rank, names.rank, *switches)
    draft.put("model.lora.alpha", float(draft.value(names.alpha, names.usual_alpha)), names.alpha)
    if draft.gives(names.targets):
        given = draft.value(names.targets)
        targets = [given] if isinstance(given, str) else given
        own = [module for name in targets for module in names.modules.get(name, (name,))]
        draft.put("model.lora.targets", own, names.targets)
    if scaling and draft.value(scaling):
        draft.put("model.lora.scaling", "rslora", scaling)
    if draft.gives(names.dropout) or names.usual_dropout:
        off = not draft.value(names.dropout, names.usual_dropout)
        draft.row(Fate.TAKEN if off else Fate.REFUSED, names.dropout, "so it is here" if off else NO_DROPOUT)


def learning_rate_field(draft: Draft, name: str) -> str:
    """The field of a setting of the learning rate in this command's own section."""
    path = here(name, draft.script.command)
    assert path is not None
    return path


def put_schedule(draft: Draft, name: str, *, path: str = "") -> None:
    """The learning rate after the warm-up."""
    path = path or learning_rate_field(draft, "lr_scheduler_type")
    given = str(draft.value(name) or "constant").rpartition(".")[2].lower()
    found = SCHEDULES.get(given)
    if not found:
        draft.row(Fate.REFUSED, name, f"expected one of constant, linear, cosine: set {path}")
    else:
        draft.put(path, found, name)


def put_warmup(draft: Draft, steps: int | None, *names: str, share: float = 0.0, path: str = "") -> None:
    """Steps of warm-up, or a share of the run's optimizer steps.

    Args:
        draft: the run file.
        steps: optimizer steps; None: `share` is given.
        names: the settings.
        share: of all optimizer steps.
        path: the field of steps; empty: that of the command.
    """
    path = path or learning_rate_field(draft, "warmup_steps")
    if steps is not None or not share:
        draft.put(path, int(steps or 0), *names)
    else:
        draft.put(path.replace("warmup_steps", "warmup_ratio"), share, *names)


def put_trackers(draft: Draft, name: str) -> None:
    """Trackers of the same names; the files of the run's folder are always written."""
    value = draft.value(name)
    given = [str(item).lower() for item in (value if isinstance(value, list | tuple) else [value])]
    known = [item for item in given if item in TRACKERS]
    others = [
        item for item in given if item not in TRACKERS and item not in ("none", "console", "false", "null", "file")
    ]
    if others and name in draft.script.settings:
        why = f"no tracker {', '.join(others)}: metrics are in the run's folder, `rlsdk watch RUN` shows them"
        draft.put("tracking.trackers", ["jsonl", "tensorboard", *known], name, fate=Fate.REFUSED, why=why)
    elif name in draft.script.settings:
        draft.put(
            "tracking.trackers",
            ["jsonl", *known],
            name,
            fate=Fate.OTHERWISE,
            why="the run's folder always has all metrics",
        )


def put_devices(draft: Draft, nodes: Any, devices: Any, *names: str, why: str = "") -> int:
    """Nodes and devices per node; returns the number of all devices."""
    nodes, devices = (_count(nodes), _count(devices))
    if nodes * devices > 1:
        draft.put("placement.devices_per_node", devices, *names[:1], why=why)
        draft.put("placement.num_nodes", nodes, *names[1:2])
        if nodes > 1:
            draft.fields["placement.ray_address"] = "auto"
            draft.notes["placement.ray_address"] = "a cluster of several nodes is started beforehand (`ray start`)"
    else:
        for name in names:
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "one device, as by default")
    return int(nodes * devices)


def _count(value: Any) -> int:
    return max(int(str(value).partition(".")[0]), 1) if re.fullmatch(r"\d+(\.0)?", str(value)) else 1


def put_rewards(draft: Draft, rewards: Sequence[tuple[str, Any]], weights: Sequence[Any] = ()) -> None:
    """Terms of the reward: functions as `file.py:fn`, models by path.

    Args:
        draft: the run file.
        rewards: the setting of each term, and its value.
        weights: of the terms; empty: 1 each.
    """
    terms: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    for position, (name, value) in enumerate(rewards):
        weight = weights[position] if position < len(weights) else 1.0
        weighted = {} if weight == 1 else {"weight": float(weight)}
        known = KNOWN_REWARDS.get(str(value))
        if isinstance(value, Unknown) or value is None:
            draft.row(Fate.REFUSED, name, "no function of a file: give it a name with `def` and a file of its own, and "
                      "name it in rewards", stops=True)  # fmt: skip
        elif known is None and name.startswith("reward_funcs") and re.fullmatch(r"[a-z_]\w*", str(value)):
            draft.row(Fate.REFUSED, name, f"{value} is known to the script's program only: write it as a function into "
                      "a file and name it in rewards, file.py:fn", stops=True)  # fmt: skip
        elif known is not None:
            terms.append({**known[0], **weighted})
            _put_list(draft, "rewards", terms, name, Fate.OTHERWISE, known[1])
        elif str(value).startswith(f"{draft.script.source}:"):
            function = str(value).rpartition(":")[2]
            draft.functions.append(function)
            terms.append({"name": f"{draft.script.rewards_file}:{function}", **weighted})
            why = f"copied with what it uses: importing {draft.script.source} would need {draft.script.peer}"
            _put_list(draft, "rewards", terms, name, Fate.TAKEN, why)
        elif is_function(str(value)) or str(value).startswith(("http://", "https://")):
            terms.append({"name": str(value), **weighted})
            _put_list(draft, "rewards", terms, name, Fate.TAKEN, "")
        else:
            role = (
                {}
                if len([1 for _, other in rewards if not is_function(str(other))]) == 1
                else {"name": f"rm{position}"}
            )
            models.append({"path": str(value), **role, **weighted})
            _put_list(draft, "reward_models", models, name, Fate.TAKEN, "")


def _put_list(draft: Draft, path: str, items: list[dict[str, Any]], name: str, fate: Fate, why: str) -> None:
    draft.fields[path] = [dict(item) for item in items]
    note = f"{draft.script.peer}: {name}" + (f"; {why}" if why else "")
    draft.notes[path] = f"{draft.notes[path]}. {note}" if len(items) > 1 and path in draft.notes else note
    shown = ", ".join(f"{key} {value}" for key, value in items[-1].items())
    draft.row(fate, name, why, [f"{path}.{len(items) - 1}: {shown}"])


def is_function(text: str) -> bool:
    """Whether a text names a function: `file.py:fn` or `package.module:fn`."""
    return re.fullmatch(r"[^\s:]+\.py:\w+|[A-Za-z_][\w.]*:\w+", text) is not None


_MATH = ({"name": "math"}, "the same grader (math-verify): the answer is data.answer_field")
_FORMAT = ({"name": "format"}, "tags once each and in order; theirs asks for fewer of them")
KNOWN_REWARDS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    **dict.fromkeys(("trl.rewards:accuracy_reward", "accuracy_reward", "accuracy"), _MATH),
    **dict.fromkeys(("trl.rewards:think_format_reward", "think_format_reward", "format"), _FORMAT),
}
"""Rewards of peers that have a counterpart among ours, and the difference."""


def counted_in_steps(value: Any, each: int) -> int | None:
    """A number of optimizer steps in trainer steps, of `each` optimizer steps; None if it is a share or no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 1:
        return None
    return max(round(value / each), 1)


def check_group(draft: Draft, name: str) -> None:
    """Adds a row if an estimator compares the samples of a prompt, and there is one."""
    if draft.fields.get("algorithm.advantage") in NEEDS_GROUP and draft.fields.get("trainer.samples_per_prompt", 8) < 2:
        why = f"{draft.fields['algorithm.advantage']} compares the samples of a prompt: set at least 2"
        draft.row(Fate.REFUSED, name, why, ["trainer.samples_per_prompt"], stops=True)
