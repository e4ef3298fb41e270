"""Records of a simulation: device rates, settings, and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD_SPEEDUP = 3.0
"""Ratio of the throughput of a forward pass to that of forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of devices, in seconds or per second."""

    decode_s: float
    """Seconds of a decoding step of one replica with one sample."""
    decode_s_per_sample: float = 0.0
    """Additional seconds of a decoding step for each further sample."""
    latency_s: float = 0.0
    """Seconds of a sample before its first token and after its last one, when its slot is free."""
    grade_s: float = 0.0
    """Additional seconds until it is graded; draining before new weights does not wait for that."""
    prefill_tokens_per_s: float = 50_000.0
    """Prefill throughput of one replica, for samples whose KV cache is recomputed."""
    prompt_tokens: float = 0.0
    """Prompt tokens of a sample, whose KV cache is recomputed too."""
    train_tokens_per_s: float = 5_000.0
    """Sampled tokens per second of one device, for log-probs and update together, of samples that are not stale."""
    stale_work: float = 1.0
    """Factor of the training work of stale samples: a synchronous step may need fewer forward passes."""
    sync_s: float = 0.0
    """Seconds of a weight sync during which replicas do not decode."""
    switch_s: float = 0.0
    """Seconds to switch devices that take turns, there and back."""
    controller_s: float = 0.0
    """Processor seconds per step of the controller and Ray's daemons."""
    cores: int = 0
    """Processors of the machine, if the devices are processors of it: if as many devices work, the controller takes
    time from them, and a training device that sends weights shares its processor with the update. 0: the controller and
    senders have processors of their own."""
    update_variation: float = 0.0
    """Variation of an update's seconds between steps: standard deviation of their logarithm. If both pools take about
    equally long, constant rates would let every sample end just before new weights arrive, so that none continues under
    them."""
    decode_variation: float = 0.0
    """Variation of a replica's decoding steps between the samples of one step and the next, in the same form."""
    max_running: int = 256
    """Most samples that one replica decodes at once."""
    devices_per_replica: int = 1

    @property
    def overlapped_sync_s(self) -> float:
        """`sync_s` while a step trains. Half of it is sending, which takes twice as long next to an update on the same
        processor, and slows the update by as much."""
        return self.sync_s * (1.5 if self.cores else 1.0)

    @property
    def sending_s(self) -> float:
        """Seconds that an update loses to a concurrent sync."""
        return 0.5 * self.sync_s if self.cores else 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A schedule on a number of devices."""

    train_devices: int
    rollout_devices: int
    shared: bool = False
    """Whether the same devices do both in turns: the synchronous run."""
    groups_per_step: int
    samples_per_group: int
    max_staleness: int = 0
    partial: bool = False
    """Whether samples continue under new weights, and groups are trained on in the order in which they finish. False:
    samples finish before new weights arrive."""

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.rollout_devices if self.shared else self.train_devices + self.rollout_devices

    @property
    def drains(self) -> bool:
        """Whether weights are published, concurrently with an update, when the last token is sampled."""
        return self.max_staleness > 0 and not self.partial


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Results of a simulation, without the first and last steps."""

    step_s: float
    train_idle: float
    """Fraction of time in which the training pool is idle."""
    rollout_idle: float
    """Fraction of sample slots that are empty."""
    staleness: Sequence[float]
    """Trainer steps between the first weights of a sample and its training -> share of samples."""
    num_events: int
