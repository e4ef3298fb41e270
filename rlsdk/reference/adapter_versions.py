"""Versions of an adapter that are served side by side: each has its values, and a decoder of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.reference.decoding import Decoder

Values = dict[str, Tensor]
"""A and B by name."""


@dataclass(eq=False)
class Lane:
    """What runs under one version. Rows of two versions never share a pass, so the numbers of one do not depend on
    what runs under the others."""

    version: int
    values: Values
    decoder: Decoder
    most: int
    """Largest number of rows."""


class AdapterVersions:
    """The versions that requests may name, and what runs under others."""

    def __init__(self, low: Mapping[str, Tensor], make_decoder: Callable[[], Decoder], *, count: int, most: int):
        """Keeps none yet.

        Args:
            low: A and B that the model computes with.
            make_decoder: makes a decoder without jobs.
            count: versions that are kept.
            most: rows of all versions together; each has its share.
        """
        self._low, self._make_decoder, self._count, self._most = low, make_decoder, count, most
        self.kept: dict[int, Lane] = {}
        """By version, oldest first."""
        self.ending: list[Lane] = []
        """Lanes that take no more requests, and still have jobs."""

    @property
    def lanes(self) -> list[Lane]:
        """All of them, oldest first; those that are done with are dropped."""
        self.ending = [lane for lane in self.ending if lane.decoder.jobs]
        return [*self.ending, *self.kept.values()]

    def own_values(self) -> Values:
        """What the model computes with now."""
        return {name: parameter.data for name, parameter in self._low.items()}

    def new_values(self) -> Values:
        """Memory of the same shapes."""
        return {name: torch.zeros_like(parameter.data) for name, parameter in self._low.items()}

    def show(self, values: Values) -> None:
        """Lets the model compute with these values."""
        for name, parameter in self._low.items():
            parameter.data = values[name]

    def keep(self, version: int, values: Values) -> None:
        """Keeps a version as the newest; one of its name, and the oldest one beyond the count, take no more
        requests."""
        if (same := self.kept.pop(version, None)) is not None:
            self.ending.append(same)
        self.kept[version] = Lane(version, values, self._make_decoder(), max(self._most // self._count, 1))
        while len(self.kept) > self._count:
            self.ending.append(self.kept.pop(next(iter(self.kept))))

    def end(self, version: int, values: Values, decoder: Decoder) -> None:
        """Lets the jobs of another decoder finish under these values."""
        self.ending.append(Lane(version, values, decoder, self._most))

    def share_rows(self, running: int) -> int:
        """Says to each decoder how many rows it may have. `running`: rows that are not of these lanes; returns how many
        there may be."""
        lanes = self.lanes
        free = self._most - running - sum(lane.decoder.running.num_alive for lane in lanes)
        for lane in lanes:
            alive = lane.decoder.running.num_alive
            lane.decoder.max_running = min(lane.most, alive + max(free, 0))
            free -= max(lane.decoder.max_running - alive, 0) if lane.decoder.jobs else 0
        return running + max(free, 0)

    def drop(self) -> None:
        """Forgets all versions."""
        self.kept.clear()

    def sleep(self, level: int) -> None:
        """As `RolloutEngine.sleep`."""
        if level > 1:
            self.drop()
        self.wake("cpu")

    def wake(self, device: str) -> None:
        """Moves all versions to a device. The newest one is where the model's own values are."""
        for lane in self.kept.values():
            lane.values = {name: tensor.to(device) for name, tensor in lane.values.items()}
        if self.kept:
            newest = next(reversed(self.kept.values()))
            newest.values = self.own_values()
