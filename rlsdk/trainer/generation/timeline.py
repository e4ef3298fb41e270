"""Metrics of a schedule: how the two pools spend their time, how old samples are, and which lengths are trained on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rlsdk.interfaces import Batch
from rlsdk.rollouts import Group

Sums = tuple[int, int]
"""Number of sampled tokens, and number of samples."""


class Lengths:
    """Compares the lengths that were trained on with those that were generated.

    After k steps, compares the samples that these steps trained on with the accepted groups that k steps would have
    trained in the order of starting, as soon as all of those groups are finished. If each step trains the groups that
    were started for it, both are the same.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._order: deque[int] = deque()
        """Groups in the order of starting, from the oldest that is not counted yet."""
        self._made: dict[int, Sums | None] = {}
        """Finished groups that are not counted yet; None: not accepted."""
        self._count = 0
        self._sums: Sums = (0, 0)
        self._generated: list[Sums] = []
        self._trained: list[Sums] = []

    def started(self, ordinals: Sequence[int]) -> None:
        self._order.extend(ordinals)

    def made(self, group: Group, *, accepted: bool) -> None:
        """Records a finished group."""
        self._made[group.task.ordinal] = sampled_tokens([group]) if accepted else None
        while self._order and self._order[0] in self._made:
            sums = self._made.pop(self._order.popleft())
            if sums is not None:
                self._count += 1
                self._sums = _added(self._sums, sums)
                if self._count % self._groups_per_step == 0:
                    self._generated.append(self._sums)

    def trained(self, groups: Sequence[Group]) -> None:
        """Records the groups that a step trains on."""
        before = self._trained[-1] if self._trained else (0, 0)
        self._trained.append(_added(before, sampled_tokens(groups)))

    def bias(self) -> float | None:
        """Ratio of the mean trained length to the mean generated length, minus 1; None: not known yet."""
        steps = min(len(self._generated), len(self._trained))
        if not steps:
            return None
        (tokens, samples), (all_tokens, all_samples) = self._trained[steps - 1], self._generated[steps - 1]
        if not samples or not all_tokens:
            return None
        return (tokens * all_samples) / (samples * all_tokens) - 1.0


class Timeline:
    """Measures the times of a schedule. Written by the driver, read by the trainer."""

    def __init__(
        self,
        busy_s: Callable[[], float],
        lengths: Lengths,
        concurrency: Callable[[], float] | None = None,
        controller_s: Callable[[], float] = time.process_time,
    ) -> None:
        """Starts to measure.

        Args:
            busy_s: returns the seconds in which the rollout pool had work since it started.
            lengths: lengths of the groups.
            concurrency: returns the number of samples that a replica may run concurrently.
            controller_s: returns the CPU seconds of the controller and its helper processes since it started.
        """
        self._busy_s = busy_s
        self._concurrency = concurrency
        self.lengths = lengths
        self._wait_s = 0.0
        self._hold_s = 0.0
        self._updated: dict[int, float] = {}
        self._lag_s: float | None = None
        self._controller_s = controller_s
        self._last = time.monotonic(), busy_s(), controller_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager: measures how long the trainer waits for the next groups."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._wait_s += time.monotonic() - start

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context manager: measures how long the training pool waits for a copy of the weights."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._hold_s += time.monotonic() - start

    def updated(self, step: int) -> None:
        self._updated[step] = time.monotonic()

    def published(self, step: int) -> None:
        if step in self._updated:
            self._lag_s = time.monotonic() - self._updated.pop(step)

    def metrics(self, publish_s: float) -> dict[str, float]:
        """Metrics of the step that ends now.

        Args:
            publish_s: seconds of serving that the last publish cost the replicas.
        """
        now, busy, controller = time.monotonic(), self._busy_s(), self._controller_s()
        passed, worked, controlled = now - self._last[0], busy - self._last[1], controller - self._last[2]
        waited, self._wait_s, self._last = self._wait_s, 0.0, (now, busy, controller)
        held, self._hold_s = self._hold_s, 0.0
        bias = self.lengths.bias()
        return {
            "time/wait_prev_gen_s": waited,
            "time/publish_s": publish_s,
            "time/hold_s": held,
            "time/controller_cpu_s": controlled,
            **({"time/publish_lag_s": self._lag_s} if self._lag_s is not None else {}),
            **({"schedule/length_bias": bias} if bias is not None else {}),
            **({"rollout/concurrency": self._concurrency()} if self._concurrency is not None else {}),
            "time/train_idle_share": min(waited / passed, 1.0) if passed else 0.0,
            "time/rollout_idle_share": min(max(1.0 - worked / passed, 0.0), 1.0) if passed else 0.0,
        }


def staleness_metrics(batch: Batch, step: int, step_of: Mapping[int, int], most: int) -> dict[str, float]:
    """Staleness of each sampled token in trainer steps.

    Args:
        batch: batch with `token_versions`.
        step: step of the weights that are updated; staleness is counted from it.
        step_of: policy version -> newest step that ended with it.
        most: largest allowed staleness.

    Returns:
        Mean and maximum, and the share of tokens with each staleness from 0 to `most`.
    """
    versions = batch["token_versions"][batch["response_mask"]]
    known, counts = torch.unique(versions, return_counts=True)
    oldest = min(step_of.values(), default=step)
    behind = torch.tensor([step - step_of.get(int(version), oldest) for version in known.tolist()], dtype=torch.float64)
    total = max(int(counts.sum()), 1)
    return {
        "schedule/staleness_mean": float((behind * counts).sum()) / total,
        "schedule/staleness_max": float(behind.max()) if len(behind) else 0.0,
        **{
            f"schedule/staleness_share_{steps}": int(counts[behind == steps].sum()) / total for steps in range(most + 1)
        },
    }


def sampled_tokens(groups: Sequence[Group]) -> Sums:
    """Sums over all samples whose rollouter did not fail."""
    lengths = [sample.num_sampled for group in groups for sample in group.samples if sample.rows]
    return sum(lengths), len(lengths)


def _added(first: Sums, second: Sums) -> Sums:
    return first[0] + second[0], first[1] + second[1]
