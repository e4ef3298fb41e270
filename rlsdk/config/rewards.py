"""The terms of the reward, and what grading may cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlsdk.config.base import Options, Section, empty_mapping, empty_tuple


class RewardConfig(Section):
    """One term of the reward; a sample's score is the weighted sum of all."""

    name: str
    """A registered reward, `pkg.mod:fn`, or `file.py:fn`."""
    weight: float = 1.0
    """Factor of this term in the score."""
    options: Options = empty_mapping()
    """Keyword arguments of the function."""


class RewardLimitsConfig(Section):
    """What a reward function may cost. Past a limit the sample has no score, is counted, and carries no gradient."""

    timeout_s: PositiveFloat = 10.0
    """Seconds per sample."""
    memory_mb: PositiveInt = 1024
    """MiB of address space that grading may add to one grading process."""
    max_failure_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a step's samples; when more fail, the run stops with the counts by kind."""
    num_workers: PositiveInt | None = None
    """Grading processes; null: by the number of processors."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to start a grading process: imports of reward modules and their `prepare`."""
    batched_timeout_s: PositiveFloat = 60.0
    """Seconds for one call of a batched reward; past it, its samples are tried one by one."""
    batch_timeout_s: PositiveFloat = 600.0
    """Seconds for all samples that are graded together; what is not graded then counts as timed out."""
    max_losses_in_a_row: PositiveInt = 5
    """Grading processes lost without a sample graded in between; what is not graded then counts as crashed."""
    allow_network: bool = False
    """Lets rewards open sockets, for instance to ask a judge. False: the system refuses it, where it can."""
    allow_writes: bool = False
    """Lets rewards write files outside their folder for temporary files. False: the system refuses it, where it can."""
    isolation: Literal["auto", "always", "never"] = "auto"
    """Grade every sample in a forked process of its own: auto, with rewards that evaluate text as Python; always, with
    all rewards, which costs milliseconds a sample and forgets what a reward keeps from call to call."""
    environment: tuple[str, ...] = empty_tuple()
    """Environment variables that rewards get besides the ordinary ones (an API key, for instance)."""
