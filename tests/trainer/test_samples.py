"""What of a step's samples is logged: the best and the worst of prompts that come again, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlsdk.algorithms import has_signal
from rlsdk.config import LengthConfig
from rlsdk.interfaces import (
    Episode,
    FinishReason,
    PromptView,
    Receipt,
    SamplingParams,
    Span,
    ToolUse,
    Trajectory,
    VersionRun,
)
from rlsdk.rollouts import Grade, Group, GroupId, GroupTask, Sample, make_batch
from rlsdk.trainer.generation.sampler import scores_of
from rlsdk.trainer.inputs.codec import TokenCodec
from rlsdk.trainer.tracking.episodes import MAX_CHARS, conversation
from rlsdk.trainer.tracking.samples import SampleLog, plain_columns, shown_samples


def sampled(score: float, ids: list[int]) -> Sample:
    given = Span.given([1, 2, 3])
    made = Span(
        token_ids=np.array(ids),
        log_probs=np.full(len(ids), -0.5, np.float32),
        versions=(VersionRun(version=0, num_tokens=len(ids)),),
    )
    tool = Span.given([7])
    trajectory = Trajectory(spans=(given, made, tool), finish_reason=FinishReason.STOP)
    return Sample(
        episode=Episode(rows=(trajectory,)), text=f"text {ids}", grade=Grade(score=score, terms={"exact": score})
    )


def group(index: int, scores: list[float], epoch: int = 0, *, lost: int | None = None) -> Group:
    task = GroupTask(
        id=GroupId(source="train", epoch=epoch, index=index), ordinal=index + 100 * epoch, num_samples=len(scores),
        prompt=PromptView(prompt_ids=(1, 2, 3), text=f"prompt {index}", answer="a", row={}), seed=(0,),
        sampling=SamplingParams(max_tokens=6),
    )  # fmt: skip
    samples = [sampled(score, [10 + at] * (at + 1)) for at, score in enumerate(scores)]
    if lost is not None:
        samples[lost] = Sample(episode=None, text="", grade=Grade(valid=False))
    return Group(task=task, samples=samples)


def logged(groups: list[Group], log: SampleLog, **tokens: float) -> list[dict]:  # type: ignore[type-arg]
    batch = make_batch(groups, temperature=1.0)
    fields = {name: torch.full((batch.num_tokens,), value) for name, value in ({"advantages": 0.25} | tokens).items()}
    fields["advantages"] = fields["advantages"] * batch["response_mask"]
    return [dict(sample) for sample in shown_samples(groups, batch.with_tokens(**fields), log)]


def test_an_episode_is_logged_as_a_conversation() -> None:
    first, second = (sampled(1.0, ids).rows[0].spans[1] for ids in ([8, 9], [4]))
    again = Span.given(first.token_ids)
    prompt = Span.given([1])
    rows = (
        Trajectory(spans=(prompt, first), finish_reason=FinishReason.STOP),
        Trajectory(spans=(prompt, again, Span.given([5] * MAX_CHARS), second), finish_reason=FinishReason.STOP),
    )
    receipt = Receipt(sampled=7, trained=3, not_trained={"abandoned": 4})
    use = ToolUse(turn=0, name="look", arguments={"at": 1}, result="x" * (MAX_CHARS + 1), failed=True)
    episode = Episode(rows=rows, chains=(0, 1), scales=(1.0, 2.0), receipt=receipt, tools=(use,))
    found = conversation(episode, lambda ids: [f"{token}," for token in ids])
    one, two = found["rows"]
    assert (one["chain"], one["scale"], one["trained"]) == (0, 1.0, 2)
    assert one["spans"] == [
        {"text": "1,", "tokens": 1, "sampled": False}, {"text": "8,9,", "tokens": 2, "sampled": True, "versions": [0]},
    ]  # fmt: skip
    assert (two["chain"], two["scale"], two["trained"]) == (1, 2.0, 1)
    assert two["spans"][1] == {"text": "8,9,", "tokens": 2, "sampled": False, "trained_in": 1}
    assert two["spans"][3] == {"text": "4,", "tokens": 1, "sampled": True, "versions": [0]}
    assert f"[{MAX_CHARS} characters]" in two["spans"][2]["text"]
    assert found["not_trained"] == {"abandoned": 4}
    (tool,) = found["tools"]
    assert (tool["turn"], tool["name"], tool["arguments"], tool["failed"]) == (0, "look", {"at": 1}, True)
    assert "[1 characters]" in tool["result"]
    assert conversation(Episode(rows=rows[:1]), lambda ids: [""] * len(ids)) == {}, "a single turn is plain"


def test_the_best_and_the_worst_of_a_prompt_are_logged_with_the_scores_of_all() -> None:
    [best, worst] = logged([group(0, [0.5, 1.0, 0.0, 0.500001])], SampleLog(count=2))
    assert (best["sample"], worst["sample"]) == (1, 2)
    assert best["group_scores"] == worst["group_scores"] == [0.5, 1.0, 0.0, 0.500001]
    assert best["group"] == "train/0/0"
    assert best["reward/exact"] == 1.0
    assert best["advantage"] == pytest.approx(0.25)


def test_rows_are_those_of_the_samples_also_where_one_was_not_made() -> None:
    pieces = lambda ids: [f"<{token}>" for token in ids]  # noqa: E731
    groups = [group(0, [0.0, 0.0], lost=0), group(1, [0.0, 1.0, 0.5], lost=1)]
    found = logged(groups, SampleLog(count=9, max_tokens=8, pieces=pieces))
    texts = {(sample["prompt"], sample["sample"]): "".join(sample["tokens"]) for sample in found}
    assert texts == {("prompt 0", 1): "<11><11><7>", ("prompt 1", 0): "<10><7>", ("prompt 1", 2): "<12><12><12><7>"}
    assert found[0]["group_scores"].count(None) == 1


def test_a_prompt_that_was_logged_once_is_logged_in_every_epoch() -> None:
    one_step = SampleLog(count=2)
    first = logged([group(index, [0.0, 1.0]) for index in range(8)], one_step)
    again = logged([group(index, [0.0, 1.0], epoch=1) for index in (5, 3, 1, 7, 0, 2, 6, 4)], one_step)
    assert [s["prompt"] for s in first] == [s["prompt"] for s in again]
    assert first[0]["group"] != again[0]["group"]


def test_tokens_have_the_log_probs_of_both_engines_and_given_ones_have_none() -> None:
    log = SampleLog(count=1, max_tokens=2, pieces=lambda ids: [f"<{token}>" for token in ids])
    [sample] = logged([group(0, [1.0, 1.0, 1.0])], log, old_log_probs=-0.75)
    assert sample["tokens"] == ["<10>", "<7>"]
    assert sample["log_probs"] == [-0.5, None]
    assert sample["train_log_probs"] == [-0.75, None]
    [sample] = logged([group(0, [1.0])], SampleLog(count=1, max_tokens=1, pieces=log.pieces))
    assert sample["rest"] == "<7>"
    assert "train_log_probs" not in sample
    assert "tokens" not in plain_columns([sample])[0]


def test_no_sample_is_asked_for_and_none_was_made() -> None:
    assert logged([group(0, [1.0])], SampleLog(count=0)) == []


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(
    "text", ["plain text", "Größe: 3 °C", "\N{GRINNING FACE} and \N{CJK UNIFIED IDEOGRAPH-4E2D}", ""]
)
def test_pieces_of_tokens_are_the_text_and_no_half_characters(text: str) -> None:
    codec = TokenCodec(byte_tokenizer())
    ids = codec.encode(text)
    pieces = codec.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_spaces_that_depend_on_what_stands_before_are_kept() -> None:
    inner = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c"))
    inner.decoder = decoders.Metaspace()
    codec = TokenCodec(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert codec.decode([0, 1, 2, 0]) == "a bc a"
    assert codec.pieces([0, 1, 2, 0]) == ["a", " b", "c", " a"]


@pytest.mark.parametrize(
    ("lengths", "scores"),
    [
        (LengthConfig(), [1.0, 1.0, 1.0]),
        (LengthConfig(overlong_filter=True), [1.0, 1.0, 1.0]),
        (LengthConfig(penalty=0.5, free_tokens=1), [1.0, 0.5, 0.0]),
        (LengthConfig(soft_tokens=2), [1.0, 1.0, 0.5]),
        (LengthConfig(shorter_reward=1.0), [1.5, 1.0, 0.5]),
    ],
)
def test_a_group_is_judged_by_its_whole_score(lengths: LengthConfig, scores: list[float]) -> None:
    found = scores_of(group(0, [1.0, 1.0, 1.0]), lengths, max_tokens=4)
    assert found == pytest.approx(scores)
    assert has_signal(torch.tensor(found)) == (len(set(scores)) > 1)


def test_a_sample_that_was_not_made_is_in_no_judgement() -> None:
    assert scores_of(group(0, [1.0, 1.0, 1.0], lost=0), LengthConfig(penalty=0.5), max_tokens=4) == [0.0, -0.5]
    assert scores_of(group(0, [1.0], lost=0), LengthConfig(penalty=0.5), max_tokens=4) == []
