"""Generation and evaluation without training: a rollout engine alone, on a checkpoint or a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig
from rlsdk.interfaces import CheckpointError, ConfigError, SamplingParams
from rlsdk.trainer.checkpoint import CheckpointStore, damage, faults, older_whole
from rlsdk.trainer.hosts import Samples
from rlsdk.trainer.parts import decode
from rlsdk.trainer.rollout import sample
from rlsdk.trainer.run_folder import Notice, silent
from rlsdk.trainer.session import RoleGroup, rollout_role, start_cluster

if TYPE_CHECKING:
    from rlsdk.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a path stands for."""

    model: Path
    """Folder in Hugging Face form."""
    config: Path | None
    """The configuration it was trained with, when it comes from a run."""


def find_model(path: Path, notice: Notice = silent) -> ModelSource:
    """Takes a run, a checkpoint or a model folder.

    Args:
        path: of one of these.
        notice: receives a line for each damaged checkpoint of a run that is skipped.

    Raises:
        ConfigError: it is none of these, or damaged; says what was looked for.
    """
    try:
        store = CheckpointStore(path / "checkpoints", 1)
        checkpoint = path if not faults(path) else store.newest_intact(notice, "model")
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if checkpoint is not None:
        if not (checkpoint / "model" / "config.json").is_file():
            raise ConfigError(f"checkpoint {str(checkpoint)!r} has no model/: its train backend cannot export one")
        if problems := damage(checkpoint, "model"):
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} is damaged: {'; '.join(problems[:3])}{older_whole(checkpoint)}"
            )
        return ModelSource(model=checkpoint / "model", config=checkpoint / "config.yaml")
    if (path / "config.json").is_file():
        return ModelSource(model=path, config=None)
    raise ConfigError(
        f"{str(path)!r} is no run (checkpoints/step_N), no whole checkpoint ({faults(path)[0]}) and no model folder "
        "(config.json); give one of the three"
    )


@contextmanager
def open_rollout(config: RunConfig, registry: Registry, *, device: str, log_dir: Path) -> Iterator[RoleGroup]:
    """A rollout backend that serves the model of `config`, for as long as the context lives."""
    with start_cluster(config, registry, ["rollout"], device=device, run_dir=log_dir) as cluster:
        yield rollout_role(config, registry, cluster, load_weights=True)


def generate_texts(
    group: RoleGroup, tokenizer: Any, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int, seed: int
) -> list[list[str]]:
    """Texts of `n` responses to each prompt."""
    samples = sample(group, prompts, sampling, n=n, seed=(seed, "generate"))
    texts: list[list[str]] = [[] for _ in prompts]
    for request, ids in zip(samples.request.tolist(), split_samples(samples), strict=True):
        texts[request] += decode(tokenizer, [ids], sampling.stop_token_ids)
    return texts


def split_samples(samples: Samples) -> list[list[int]]:
    """Token ids of each sample."""
    ends = samples.lengths.cumsum().tolist()
    return [samples.token_ids[end - n : end].tolist() for end, n in zip(ends, samples.lengths.tolist(), strict=True)]
