"""Stream of prompts: a new order in each epoch, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsdk.data.mixture import next_part
from rlsdk.data.prompts import Prompt, PromptDataset
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.interfaces.spelling import Setting, spell


def epoch_order(size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `range(size)` that depends only on the three numbers.

    Positions are sorted by a hash (splitmix64) instead of a library's generator, so the order is the same with every
    version of every library, and runs resume identically anywhere.

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


class _Cursor:
    """Position in one part of a data set; every epoch yields each of its prompts exactly once."""

    def __init__(self, start: int, size: int, *, seed: int, shuffle: bool) -> None:
        self.start, self.size = start, size
        self._seed, self._shuffle = seed, shuffle
        self.go_to(0, 0)

    def go_to(self, epoch: int, position: int) -> None:
        """Moves to the position after this many epochs, and this many prompts of the next one."""
        self.epoch, self.position = epoch, position
        order = epoch_order(self.size, seed=self._seed, epoch=epoch) if self._shuffle else np.arange(self.size)
        self._order = self.start + order

    def take(self, count: int) -> list[int]:
        """Returns the next indices of the data set, and advances."""
        indices: list[int] = []
        while len(indices) < count:
            if self.position == self.size:
                self.go_to(self.epoch + 1, 0)
            taken = self._order[self.position : self.position + count - len(indices)]
            indices.extend(taken.tolist())
            self.position += len(taken)
        return indices

    @property
    def taken(self) -> int:
        """Number of prompts taken since the start."""
        return self.epoch * self.size + self.position


class PromptStream:
    """Infinite stream of prompts: every epoch yields each prompt exactly once, and a batch may span two epochs.

    Every part of a mixture has its own epochs, and prompts are drawn by weight: see `next_part`.
    """

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
        self._weights = [part.weight for part in dataset.parts]
        starts = accumulate((part.size for part in dataset.parts), initial=0)
        self._cursors = [
            _Cursor(start, part.size, seed=seed, shuffle=shuffle)
            for start, part in zip(starts, dataset.parts, strict=False)
        ]

    @property
    def epoch(self) -> int:
        """Number of complete epochs before the next prompt; for a mixture, the smallest of its parts."""
        return min(cursor.epoch for cursor in self._cursors)

    @property
    def position(self) -> int:
        """Number of prompts taken of the current epoch; for a mixture, the sum over its parts."""
        return sum(cursor.position for cursor in self._cursors)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts, and advances."""
        if len(self._cursors) == 1:
            places = self._cursors[0].take(num_prompts)
        else:
            places = [self._next() for _ in range(num_prompts)]
        return [self._dataset[at] for at in places]

    def _next(self) -> int:
        part = next_part(self._weights, [cursor.taken for cursor in self._cursors])
        return self._cursors[part].take(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers; for a mixture, with those of its parts."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "num_prompts": len(self._dataset),
            "fingerprint": self._fingerprint,
        }
        if len(self._cursors) > 1:
            state["parts"] = [[cursor.epoch, cursor.position] for cursor in self._cursors]
            state["weights"] = [str(weight) for weight in self._weights]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position: the next batches are those that would have followed.

        Args:
            state: of `state_dict`.

        Raises:
            CheckpointError: data, seed or order differ, or the state is incomplete.
        """
        wanted = self.state_dict().keys() - {"parts", "weights"}
        missing = sorted(wanted - state.keys())
        if missing:
            raise CheckpointError(f"the saved data position lacks {missing}; it has {sorted(state)}")
        if differences := self._differences(state):
            raise CheckpointError(
                f"the data is not what the checkpoint was made with: {'; '.join(differences)}. A resumed run would see "
                "other prompts: restore the data and settings, or train the checkpoint's weights on the new data in a "
                "run of their own, "
                f"{spell(Setting('model.path', 'RUN/checkpoints/STEP/model'), Setting('trainer.run_name', 'NAME'))}"
            )
        places = _checked_places(state)
        if len(places) != len(self._cursors):
            raise CheckpointError(f"the saved data position has {len(places)} parts; the data has {len(self._cursors)}")
        for cursor, (epoch, position) in zip(self._cursors, places, strict=True):
            cursor.go_to(epoch, min(position, cursor.size))

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        words = {"num_prompts": "number of prompts", "seed": "seed", "shuffle": "shuffling"}
        now = self.state_dict()
        differences = [
            f"{text} {state[key]} then, {now[key]} now" for key, text in words.items() if state[key] != now[key]
        ]
        if state.get("weights") != now.get("weights"):
            differences.append(f"weights of the mixture {state.get('weights')} then, {now.get('weights')} now")
        if state["fingerprint"] != now["fingerprint"]:
            differences.append("content (prompts, answers, tokenizer or their order)")
        return differences


def _checked_places(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Epoch and position of each part.

    Raises:
        CheckpointError: a number is invalid.
    """
    parts = state.get("parts", [[state["epoch"], state["position"]]])
    good = isinstance(parts, list) and all(
        isinstance(part, list)
        and len(part) == 2
        and all(type(number) is int and 0 <= number < 2**53 for number in part)
        for part in parts
    )
    if not good:
        raise CheckpointError(
            f"the saved data position is {str(parts)[:100]}; expected an epoch and a position of each part, both whole "
            "numbers from 0"
        )
    return [(epoch, position) for epoch, position in parts]
