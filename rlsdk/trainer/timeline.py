"""How the two pools spend their time, how old samples are, and which lengths are trained on: figures of a schedule."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rlsdk.interfaces import Batch
from rlsdk.rollouts import Group

Sums = tuple[int, int]
"""Sampled tokens, and samples."""


class Lengths:
    """Compares the lengths that were trained on with those that were generated.

    After k steps: of what the k steps trained on, against the first k steps' worth of accepted groups in the order in
    which they were started, as soon as all of these are made. Where a step trains its own prompts, both are the same.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._order: deque[int] = deque()
        """Groups in the order of their start, from the oldest that was not counted."""
        self._made: dict[int, Sums | None] = {}
        """Those that are made; None: not accepted."""
        self._count = 0
        self._sums: Sums = (0, 0)
        self._generated: list[Sums] = []
        self._trained: list[Sums] = []

    def started(self, ordinals: Sequence[int]) -> None:
        self._order.extend(ordinals)

    def made(self, group: Group, *, accepted: bool) -> None:
        """A group was finished."""
        self._made[group.task.ordinal] = sampled_tokens([group]) if accepted else None
        while self._order and self._order[0] in self._made:
            sums = self._made.pop(self._order.popleft())
            if sums is not None:
                self._count += 1
                self._sums = _added(self._sums, sums)
                if self._count % self._groups_per_step == 0:
                    self._generated.append(self._sums)

    def trained(self, groups: Sequence[Group]) -> None:
        """A step takes these."""
        before = self._trained[-1] if self._trained else (0, 0)
        self._trained.append(_added(before, sampled_tokens(groups)))

    def bias(self) -> float | None:
        """Mean length trained on over mean length generated, less 1; None: not known yet."""
        steps = min(len(self._generated), len(self._trained))
        if not steps:
            return None
        (tokens, samples), (all_tokens, all_samples) = self._trained[steps - 1], self._generated[steps - 1]
        if not samples or not all_tokens:
            return None
        return (tokens * all_samples) / (samples * all_tokens) - 1.0


class Timeline:
    """Takes the times of a schedule. Written by the driver, read by the trainer."""

    def __init__(
        self,
        busy_s: Callable[[], float],
        lengths: Lengths,
        concurrency: Callable[[], float] | None = None,
        controller_s: Callable[[], float] = time.process_time,
    ) -> None:
        """Begins to count.

        Args:
            busy_s: seconds in which the rollout pool had something to do, since it was started.
            lengths: of the groups.
            concurrency: samples that a replica may have under way.
            controller_s: processor time of the controller, and of what belongs to it, since it was started.
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
        """The trainer waits for the next groups."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._wait_s += time.monotonic() - start

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A copy of the weights is made; the training pool waits for that."""
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
        """Of the step that ends now.

        Args:
            publish_s: seconds that the last publish took from the replicas.
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
    """How many trainer steps behind the weights were that sampled each token.

    Args:
        batch: with `token_versions`.
        step: steps behind this one: those of the weights that are updated.
        step_of: of each policy version, the newest step with it.
        most: the bound.

    Returns:
        Mean and largest, and the share of tokens by number of steps, 0 to `most`.
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
    """Of all samples that were made."""
    lengths = [s.trajectory.num_sampled for group in groups for s in group.samples if s.trajectory is not None]
    return sum(lengths), len(lengths)


def _added(first: Sums, second: Sums) -> Sums:
    return first[0] + second[0], first[1] + second[1]
