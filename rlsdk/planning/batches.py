"""Every batch size of a run, with its unit."""

from __future__ import annotations

from dataclasses import dataclass

from rlsdk.config import Role, RunConfig
from rlsdk.interfaces import TrainSpec
from rlsdk.kit.memory.pass_memory import rows_of_pass


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """One batch size. None: not counted in that unit, or unknown."""

    what: str
    prompts: int | None
    samples: int | None
    tokens: int | None
    """Upper bound: every row has the largest length."""
    note: str = ""


def update_rows(config: RunConfig) -> int:
    """Most rows of one optimizer step."""
    return -(-config.trainer.samples_per_step // config.trainer.updates_per_step)


def running_rows(config: RunConfig, num_replicas: int) -> int:
    """Most samples that one replica decodes at once."""
    prompts = -(-config.trainer.prompts_per_step // num_replicas)
    return min(config.rollout.max_running_samples, prompts * config.trainer.samples_per_prompt)


def batch_sizes(config: RunConfig, actor: Role, *, num_replicas: int, dp_size: int | None) -> list[BatchSize]:
    """Batch sizes, the largest first."""
    trainer, longest = config.trainer, config.max_model_tokens
    samples, prompts = trainer.samples_per_step, trainer.prompts_per_step
    share, running = -(-prompts // num_replicas), running_rows(config, num_replicas)
    rows = update_rows(config)
    times = trainer.updates_per_step * trainer.epochs_per_step
    sizes = [
        BatchSize(
            what="step", prompts=prompts, samples=samples, tokens=samples * longest,
            note=f"{trainer.samples_per_prompt} samples of each prompt, rows of at most {longest} tokens",
        ),
        BatchSize(
            what="rollout, each replica", prompts=share, samples=share * trainer.samples_per_prompt,
            tokens=share * trainer.samples_per_prompt * longest,
            note=f"{num_replicas} {'replica' if num_replicas == 1 else 'replicas'}, {config.rollout.num_devices} "
            f"{'device' if config.rollout.num_devices == 1 else 'devices'} each",
        ),
        BatchSize(what="decoded at once", prompts=None, samples=running, tokens=running * longest, note="each replica"),
        BatchSize(
            what="update", prompts=None, samples=rows, tokens=rows * longest,
            note=f"one optimizer step; {times} in a step of the trainer, {trainer.optimizer_steps} in the run",
        ),
    ]  # fmt: skip
    spec = actor.spec
    if dp_size is None or not isinstance(spec, TrainSpec):
        return sizes
    mine = -(-rows // dp_size)
    per_pass, passes = rows_of_pass(spec, row_tokens=longest, num_rows=mine)
    limit = (
        f"train.micro_batch_rows {spec.micro_batch_rows}"
        if spec.micro_batch_rows is not None
        else f"train.micro_batch_tokens {spec.micro_batch_tokens}"
    )
    each = f"{dp_size} data-parallel {'rank' if dp_size == 1 else 'ranks'}"
    sizes += [
        BatchSize(what="update, each rank", prompts=None, samples=mine, tokens=mine * longest, note=each),
        BatchSize(
            what="micro-batch", prompts=None, samples=per_pass, tokens=per_pass * longest,
            note=f"{passes} in an update on each rank if every row is full; {limit}",
        ),
    ]  # fmt: skip
    return sizes
