"""Weighted mixtures: shares are exact at every moment, every part has its own epochs, and a resumed run goes on."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.data import PromptDataset, PromptStream, next_part
from rlsdk.interfaces import CheckpointError, ConfigError

from .conftest import make_tokenizer, rows_of

TOKENIZER = make_tokenizer()


def mixed(sizes: list[int], weights: list[float]) -> PromptDataset:
    parts = [
        PromptDataset(rows_of(*({"question": f"{name}{at}"} for at in range(size))), TOKENIZER)
        for name, size in zip("abcdefgh", sizes, strict=False)
    ]
    return PromptDataset.mix(parts, weights, list("abcdefgh")[: len(parts)])


WEIGHTS = st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000)


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=8), draws=st.integers(1, 150))
@settings(max_examples=60, deadline=None)
def test_no_part_is_ever_a_whole_prompt_from_its_exact_share(weights: list[Fraction], draws: int) -> None:
    taken = [0] * len(weights)
    for draw in range(1, draws + 1):
        taken[next_part(weights, taken)] += 1
        for weight, count in zip(weights, taken, strict=True):
            assert abs(weight * draw / sum(weights) - count) < 1


def test_whole_shares_come_out_exactly() -> None:
    stream = PromptStream(mixed([5, 3, 2], [0.7, 0.2, 0.1]), seed=1)
    names = [prompt.text[0] for prompt in stream.take(1000)]
    assert [names.count(name) for name in "abc"] == [700, 200, 100]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    takes=st.lists(st.integers(1, 15), min_size=1, max_size=6),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_part_gives_each_of_its_prompts_once_an_epoch(
    sizes: list[int], weights: list[float], takes: list[int], shuffle: bool
) -> None:
    stream = PromptStream(mixed(sizes, weights[: len(sizes)]), seed=5, shuffle=shuffle)
    texts = [prompt.text for count in takes for prompt in stream.take(count)]
    for name, size in zip("abcd", sizes, strict=False):
        own = [text for text in texts if text[0] == name]
        for start in range(0, len(own), size):
            assert len(set(own[start : start + size])) == len(own[start : start + size])


@given(before=st.integers(0, 30), after=st.integers(1, 30), batch=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_a_restored_mixture_goes_on_with_the_same_prompts_whatever_the_batches(
    before: int, after: int, batch: int
) -> None:
    made = mixed([5, 2, 4], [3, 1, 0.5])
    stream = PromptStream(made, seed=2)
    stream.take(before)
    state = stream.state_dict()
    expected = stream.take(after)
    resumed = PromptStream(made, seed=2)
    resumed.load_state_dict(state)
    found = [prompt for at in range(0, after, batch) for prompt in resumed.take(min(batch, after - at))]
    assert found == expected


def test_another_mixture_is_refused_and_says_what_differs() -> None:
    state = PromptStream(mixed([3, 3], [1, 2])).state_dict()
    with pytest.raises(CheckpointError, match=r"weights of the mixture \['1', '2'\] then, \['1', '3'\] now"):
        PromptStream(mixed([3, 3], [1, 3])).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"weights of the mixture .* then, None now"):
        PromptStream(mixed([6], [1])).load_state_dict(state)
    short = {**state, "parts": state["parts"][:1]}
    with pytest.raises(CheckpointError, match="has 1 parts; the data has 2"):
        PromptStream(mixed([3, 3], [1, 2])).load_state_dict(short)


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight of data source 'b'"):
        mixed([1, 1], [1, weight])


def test_a_subset_keeps_the_parts_that_are_left() -> None:
    made = mixed([3, 2, 2], [1, 2, 3]).subset([0, 2, 5])
    assert [prompt.text for prompt in made] == ["a0", "a2", "c0"]
    assert [prompt.index for prompt in made] == [0, 1, 2]
    assert [(part.name, part.size) for part in made.parts] == [("a", 2), ("c", 1)]
    assert len({prompt.text for prompt in PromptStream(made).take(4)}) <= 3


@pytest.mark.parametrize(
    "place", [{"position": -5}, {"epoch": -1}, {"epoch": 1e18}, {"position": "1"}, {"position": True}, {"parts": [[0]]}]
)
def test_a_position_that_no_stream_wrote_is_refused(place: dict[str, Any]) -> None:
    stream = PromptStream(mixed([3], [1]))
    with pytest.raises(CheckpointError, match="the saved data position is"):
        stream.load_state_dict(stream.state_dict() | place)
