"""How quick devices are, how they are set up, and what a simulation of that came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How quick devices are."""

    decode_s: float
    """Of a decoding step of one replica with one sample."""
    decode_s_per_sample: float = 0.0
    """More, for each further sample of the step."""
    latency_s: float = 0.0
    """Of a sample, before its first token and after its last one: its place is free by then."""
    grade_s: float = 0.0
    """More, until it is graded: weights that wait for samples to drain do not wait for that."""
    prefill_tokens_per_s: float = 50_000.0
    """Of one replica: what running samples cost again, where keys and values are made again."""
    prompt_tokens: float = 0.0
    """Of a sample: their keys and values are made again, too."""
    train_tokens_per_s: float = 5_000.0
    """Sampled tokens, of one device: log-probs and update together."""
    sync_s: float = 0.0
    """That a publish keeps the replicas from decoding."""
    switch_s: float = 0.0
    """That devices which take turns need each time to change over, there and back."""
    controller_s: float = 0.0
    """Processor time of a step that the controller and Ray's daemons take."""
    cores: int = 0
    """Processors of the machine, where the devices are some of them: while as many devices work, what the controller
    takes is theirs, and a training device that sends weights shares its processor with the update. 0: the controller
    has its own processors, and so has what sends weights."""
    update_variation: float = 0.0
    """Of an update's seconds from step to step: standard deviation of their logarithm. Where both halves take about as
    long, constant rates would have every sample end just before new weights come, and no sample continue under them."""
    decode_variation: float = 0.0
    """The same of a replica's decoding steps, from the samples of one step to those of the next."""
    max_running: int = 256
    """Samples that one replica decodes at once."""
    devices_per_replica: int = 1

    @property
    def overlapped_sync_s(self) -> float:
        """`sync_s` while a step trains. Sending is half of it: beside an update on the same processor it takes twice
        its time, and the update loses as much."""
        return self.sync_s * (1.5 if self.cores else 1.0)

    @property
    def sending_s(self) -> float:
        """What an update loses to the publish beside it."""
        return 0.5 * self.sync_s if self.cores else 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A schedule on so many devices."""

    train_devices: int
    rollout_devices: int
    shared: bool = False
    """The same devices do both, in turns: the synchronous run."""
    groups_per_step: int
    samples_per_group: int
    max_staleness: int = 0
    partial: bool = False
    """Samples continue under new weights, and groups are trained in the order in which they finish. False: samples
    finish before new weights come."""

    @property
    def devices(self) -> int:
        """That it takes in all."""
        return self.rollout_devices if self.shared else self.train_devices + self.rollout_devices

    @property
    def drains(self) -> bool:
        """Weights are published, beside an update, when the last token is drawn."""
        return self.max_staleness > 0 and not self.partial


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came out, between the first steps and the last ones."""

    step_s: float
    train_idle: float
    """Share of the time in which the training pool waited."""
    rollout_idle: float
    """Share of the places for samples that were empty."""
    staleness: Sequence[float]
    """Share of samples by trainer steps between the weights that began them and those that they trained."""
    num_events: int
