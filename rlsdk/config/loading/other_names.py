"""Other names of fields: those of other trainers, and those of the same setting in another command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.sections.schema import RunConfig

Choices = tuple[tuple[str, ...], ...]
_STEPS: Choices = (("trainer.steps",), ("sft.steps",), ("preferences.steps",))
_EPOCHS: Choices = (("trainer.epochs",), ("sft.epochs",), ("preferences.epochs",))
_BATCH: Choices = (("trainer.prompts_per_step",), ("sft.rows_per_step",), ("preferences.pairs_per_step",))
_RATE: Choices = (("train.optim.lr", "critic.optim.lr"), ("sft.lr",), ("preferences.lr",))
_WARMUP: Choices = (
    ("train.optim.warmup_steps", "critic.optim.warmup_steps"), ("sft.warmup_steps",), ("preferences.warmup_steps",),
)  # fmt: skip
_SAVES: Choices = (("trainer.save_every_steps",), ("sft.save_every_steps",), ("preferences.save_every_steps",))
_SAMPLES: Choices = (("trainer.samples_per_prompt",), ("eval.samples_per_prompt",))
_LENGTH: Choices = (("rollout.max_response_tokens",),)
_DECAY: Choices = (("train.optim.schedule", "critic.optim.schedule"), ("preferences.schedule",))
RATES = tuple(path for choice in _RATE for path in choice)
"""All learning rates."""
FOREIGN_NAMES: Mapping[str, Choices] = {
    **dict.fromkeys(("batch_size", "train_batch_size"), _BATCH),
    "per_device_train_batch_size": (("train.micro_batch_rows",),),
    **dict.fromkeys(("learning_rate", "lr"), _RATE),
    **dict.fromkeys(("max_steps", "steps"), _STEPS),
    **dict.fromkeys(("num_train_epochs", "epochs"), _EPOCHS),
    "warmup_steps": _WARMUP,
    **dict.fromkeys(("save_steps", "save_every_steps"), _SAVES),
    **dict.fromkeys(("lr_scheduler_type", "schedule"), _DECAY),
    **dict.fromkeys(("num_generations", "group_size", "samples_per_prompt"), _SAMPLES),
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), _LENGTH),
    "temperature": (("rollout.temperature",), ("eval.temperature",)),
    "max_prompt_length": (("data.max_prompt_tokens",),),
    "output_dir": (("trainer.run_dir",),),
    "beta": (("algorithm.kl_coef",), ("preferences.beta",)),
    "answer_template": (("algorithm.ptx.answer_template",), ("sft.answer_template",), ("preferences.answer_template",)),
    "long_answers": (("sft.long_answers",), ("preferences.long_answers",)),
    **dict.fromkeys(("dataset", "train_files"), (("data.train",),)),
    **dict.fromkeys(("data.path", "data.file", "data.files", "data.name"), (("data.train",),)),
    **dict.fromkeys(("val_files", "eval_files"), (("data.eval",),)),
}
"""Name, or full path -> the fields that have this meaning, those of one command together, in the order of preference;
a command shows the first that it reads. The paths of one entry mean the same in different commands."""
USUAL = ("train.optim.lr",)
"""Suggested first if several fields have the same name."""
MOST_ELSEWHERE = 4
Reads = Callable[[str], bool]
"""Whether a command may read the field at a path."""


def every(path: str) -> bool:
    """Of a command that may read all fields."""
    return True


def known_elsewhere(path: str) -> bool:
    """Whether a field of this path, or of its last part, has another name here."""
    return not {path, path.rpartition(".")[2]}.isdisjoint(FOREIGN_NAMES)


def meant_by(path: str, reads: Reads = every) -> Sequence[str]:
    """The fields that a path that does not exist, or its last part, probably means, of those that a command reads."""
    key = path.rpartition(".")[2]
    named = _first(FOREIGN_NAMES.get(path) or FOREIGN_NAMES.get(key, ()), reads)
    parts = (option.split(".") for option in option_paths(RunConfig))
    places = {".".join(steps[: at + 1]) for steps in parts for at in range(1, len(steps))}
    same = sorted(
        (place for place in places if place.endswith(f".{key}") and reads(place)),
        key=lambda place: (place not in USUAL, not place.startswith("train."), place),
    )
    # A table of other trainers' names knows better than an equal name, except where the equal names hold it too.
    found = same if set(named) <= set(same) else named
    return found if len(found) <= MOST_ELSEWHERE else named


def same_meaning(path: str, reads: Reads) -> Sequence[str]:
    """The fields that mean in a command what the field at `path` means in another."""
    for choices in FOREIGN_NAMES.values():
        if any(path in choice for choice in choices) and (found := _first(choices, reads)):
            return found
    return ()


def _first(choices: Choices, reads: Reads) -> tuple[str, ...]:
    known = (tuple(path for path in choice if reads(path)) for choice in choices)
    return next((choice for choice in known if choice), ())
