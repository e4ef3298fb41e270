"""A replica in virtual time: samples that are decoded together.

Every running sample advances by one token per decoding step, whose time grows with the samples that it decodes; so a
replica needs one event for each sample, not for each token.
"""

from __future__ import annotations

import heapq
from collections import deque

from rlsdk.planning.rates import Rates


class Replica:
    """Samples that are decoded together."""

    __slots__ = ("admitted", "heap", "made", "occupied", "pace", "rates", "since", "slowdown", "stamp", "waiting")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.heap: list[tuple[float, int]] = []
        """Heap of (value of `made` at which the sample ends, group)."""
        self.waiting: deque[tuple[int, int]] = deque()
        """Group and tokens of samples without a slot."""
        self.made = 0.0
        """Tokens of a sample that has run since the start."""
        self.admitted = 0.0
        """Sum of `made` at the admission of the running samples."""
        self.since = 0.0
        self.stamp = 0
        self.slowdown = 1.0
        self.pace = 1.0
        """Current time of its decoding steps relative to the rates."""
        self.occupied = 0.0
        """Slot-seconds."""

    def advance(self, now: float, *, paused: bool) -> None:
        """Advances to this time."""
        running = len(self.heap)
        if running and not paused:
            self.occupied += running * (now - self.since)
            self.made += (now - self.since) / self.step_s()
        self.since = now

    def step_s(self) -> float:
        seconds = self.rates.decode_s + self.rates.decode_s_per_sample * (len(self.heap) - 1)
        return self.slowdown * self.pace * seconds

    def fill(self) -> None:
        """Admits waiting samples to free slots."""
        while self.waiting and len(self.heap) < self.rates.max_running:
            group, tokens = self.waiting.popleft()
            self.admitted += self.made
            heapq.heappush(self.heap, (self.made + tokens, group))

    def next_end(self) -> float | None:
        """Time at which the next sample ends."""
        if not self.heap:
            return None
        return self.since + max(self.heap[0][0] - self.made, 0.0) * self.step_s()

    def recompute_s(self) -> float:
        """Seconds to recompute the KV cache of running samples."""
        tokens = len(self.heap) * (self.made + self.rates.prompt_tokens) - self.admitted
        return self.pace * max(tokens, 0.0) / self.rates.prefill_tokens_per_s
