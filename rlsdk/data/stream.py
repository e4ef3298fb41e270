"""Which prompts come next: a fresh order each epoch, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlsdk.data.prompts import Prompt, PromptDataset
from rlsdk.interfaces import CheckpointError, ConfigError


def epoch_order(size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `range(size)` that depends on the three numbers alone.

    Positions are sorted by a hash (splitmix64), not drawn from a library's generator, so the order stays the same
    with every version of every library, and a run resumes the same anywhere.

    Returns:
        `[size]` int64.
    """
    key: NDArray[np.uint64] = np.zeros(size, np.uint64)
    for number in (seed, epoch, np.arange(size)):
        key = _splitmix64(key + np.asarray(number, np.uint64))
    return np.argsort(key, kind="stable")


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea & Flood 2014; arithmetic modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PromptStream:
    """Endless prompts: every epoch gives each prompt exactly once, and a batch may reach over the border of two."""

    def __init__(self, dataset: PromptDataset, *, seed: int = 0, shuffle: bool = True) -> None:
        """Starts at the first prompt of epoch 0.

        Args:
            dataset: at least one prompt.
            seed: of the order; 0 <= seed < 2**63.
            shuffle: False keeps the order of the data set in every epoch.
        """
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed of the data order is {seed}; expected 0 <= seed < 2**63")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = dataset.fingerprint()
        self._epoch = 0
        self._position = 0
        self._order = self._new_order()

    @property
    def epoch(self) -> int:
        """Full passes over the data that are behind the next prompt."""
        return self._epoch

    @property
    def position(self) -> int:
        """Prompts of this epoch that were given."""
        return self._position

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next so many prompts, and moves on."""
        batch: list[Prompt] = []
        while len(batch) < num_prompts:
            if self._position == len(self._dataset):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._new_order()
            taken = self._order[self._position : self._position + num_prompts - len(batch)]
            batch.extend(self._dataset[int(at)] for at in taken)
            self._position += len(taken)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, in plain numbers."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "num_prompts": len(self._dataset),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int], *, allow_changed: bool = False) -> list[str]:
        """Goes to where `state` was taken: the next batches are those that would have followed.

        Args:
            state: of `state_dict`.
            allow_changed: go on although data, seed or order differ; the epoch is kept, and the position as far as
                there are prompts.

        Returns:
            What differs, in words; empty when nothing does.

        Raises:
            CheckpointError: something differs and `allow_changed` is False, or the state is not whole.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(f"the saved data position lacks {missing}; it has {sorted(state)}")
        differences = self._differences(state)
        if differences and not allow_changed:
            raise CheckpointError(
                f"the data is not what the checkpoint was made with: {'; '.join(differences)}. A resumed run would "
                f"see other prompts: restore the data and settings, or allow the change by name"
            )
        self._epoch = int(state["epoch"])
        self._position = min(int(state["position"]), len(self._dataset))
        self._order = self._new_order()
        return differences

    def _differences(self, state: Mapping[str, int]) -> list[str]:
        words = {"num_prompts": "number of prompts", "seed": "seed", "shuffle": "shuffling"}
        now = self.state_dict()
        found = [f"{text} {state[key]} then, {now[key]} now" for key, text in words.items() if state[key] != now[key]]
        if state["fingerprint"] != now["fingerprint"]:
            found.append("content (prompts, answers, tokenizer or their order)")
        return found

    def _new_order(self) -> NDArray[np.int64]:
        size = len(self._dataset)
        return epoch_order(size, seed=self._seed, epoch=self._epoch) if self._shuffle else np.arange(size)
