"""The updates in a life: of other weights each time, in pieces of any form, by sources that watch the engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import RolloutEngine, WeightShard
from rlsdk.testing.process.modes import torch_modes
from rlsdk.testing.rollout.lab import RolloutLab, pieces, whole_shards
from rlsdk.testing.rollout.memory_layouts import MEMORY_LAYOUTS, borrowed, cut_at_random

RETURN_S = 5.0
"""Seconds in which a method that returns at once has returned on another thread, although an update is under way."""


class Updates:
    """Updates one engine to other weights, and knows which it serves."""

    def __init__(self, lab: RolloutLab, engine: RolloutEngine, source: random.Random, faults: list[str]) -> None:
        """
        Args:
            lab: lab of the engine's model.
            engine: serves the lab's first weights.
            source: chooses weights and forms.
            faults: gets what the engine does wrong while it reads.
        """
        self.lab, self.engine, self.source, self.faults = lab, engine, source, faults
        self.states = [
            lab.base,
            lab.changed(0),
            lab.changed(1),
            _equal_by_shape(lab.changed(2)),
            _partly_rounded(lab.changed(3)),
        ]
        self.serving = 0
        """Index of the served weights."""

    def send(self, aborted: Sequence[str] = ()) -> None:
        """Updates to other weights than the served ones, so that a tensor that an update misses shows.

        Args:
            aborted: ids of requests that another thread aborts meanwhile.
        """
        serving = self.source.choice([at for at in range(len(self.states)) if at != self.serving])
        state, version = self.states[serving], self.source.choice((0, 1, 1, 2, 5, 2**40))
        self.engine.update_weights(self._watched(self._laid(state), aborted, torch_modes()), version)
        self.serving = serving

    def spoilt(self) -> dict[str, Tensor]:
        """Weights that are not finite."""
        state = {name: tensor.clone() for name, tensor in self.lab.base.items()}
        # One that is added to every token's hidden state, because attention may turn scores that are not finite into
        # probabilities that are; or a single logit.
        spoilt = ("o_proj.weight", "down_proj.weight", "lm_head.weight")
        name = self.source.choice([name for name in state if name.endswith(spoilt)])
        rows = slice(7, 8) if name == "lm_head.weight" else slice(None)
        state[name][rows] = self.source.choice((float("nan"), float("inf")))
        return state

    def _watched(
        self, shards: Iterator[WeightShard], aborted: Sequence[str], modes: set[tuple[str, object]]
    ) -> Iterator[WeightShard]:
        """The same items. The source's code runs in the modes of the caller, except that gradients may be off; another
        thread may abort requests while it runs."""
        for at, shard in enumerate(shards):
            if at == 1 and aborted:
                thread = threading.Thread(target=self.engine.abort, args=(aborted,), daemon=True)
                thread.start()
                thread.join(RETURN_S)
                self.faults += ["abort did not return during an update"] if thread.is_alive() else []
            if at == 1:
                changed = sorted(f"{name} is {value}" for name, value in torch_modes() - modes if name != "gradients")
                self.faults += [f"for the source of an update {', '.join(changed)}"] if changed else []
            yield shard

    def _narrowed(self, tensor: Tensor) -> Tensor:
        """The same values, perhaps in another dtype."""
        found = tensor.to(self.source.choice((torch.bfloat16, torch.bfloat16, torch.float64)))
        return found if torch.equal(found.float(), tensor) else tensor

    def _laid(self, state: Mapping[str, Tensor]) -> Iterator[WeightShard]:
        """The weights in pieces of any form."""
        form = self.source.choice(("whole", "pieces", "borrowed", "cut", "cut", "mixed"))
        if form == "mixed":
            return (replace(shard, tensor=self._narrowed(shard.tensor)) for shard in pieces(state))
        if form == "cut":
            exact = [lay for lay in MEMORY_LAYOUTS.values() if lay.dtype in (torch.float32, torch.float64)]
            return cut_at_random(state, self.source.choice(exact), self.source.randrange(1000))
        if form == "borrowed":
            return borrowed(whole_shards(state))
        return whole_shards(state) if form == "whole" else iter(pieces(state))


def _partly_rounded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These weights with every second tensor rounded to bfloat16."""
    return {name: t.bfloat16().float() if at % 2 else t for at, (name, t) in enumerate(state.items())}


def _equal_by_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """These weights with equal values in all tensors of one shape, as in a new model, and biases of 0."""
    first: dict[tuple[int, ...], Tensor] = {}
    return {
        name: torch.zeros_like(tensor) if name.endswith("bias") else first.setdefault(tuple(tensor.shape), tensor)
        for name, tensor in state.items()
    }
