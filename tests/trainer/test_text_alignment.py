"""Teachers with a tokenizer of their own: log-probs of the same text, shared out over the policy's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from test_loop import TASK, Recorder, model, registry, trainer_of
from test_teachers import alone, trained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlsdk.algorithms.distillation import shared_out
from rlsdk.interfaces import Batch, BatchError, ConfigError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.registry import Registry
from rlsdk.testing.process.models import CHARACTERS, write_cut_tokenizer, write_tiny_model
from rlsdk.trainer.inputs.text_alignment import OwnText, TextReader

__all__ = ["model", "registry"]

TEXTS = st.lists(st.tuples(st.integers(0, 3), st.floats(-9.0, 0.0)), min_size=1, max_size=12)
"""Tokens: bytes, and log-prob."""


def merging(size: int = 4000, *, prefix: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    source = random.Random(0)
    texts = ["".join(source.choices([*CHARACTERS, *"0123456789" * 3], k=24)) for _ in range(1500)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<end>", "<pad>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of another vocabulary."""
    tokenizer = merging()
    folder = write_tiny_model(
        tmp_path_factory.mktemp("teacher") / "m", seed=5, vocab_size=len(tokenizer), sharpness=2.0
    )
    for file in folder.glob("*token*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config | ids))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder)


def ends_of(tokens: list[tuple[int, float]]) -> torch.Tensor:
    return torch.tensor([size for size, _ in tokens]).cumsum(0)


@given(theirs=TEXTS, ours=TEXTS)
def test_sums_between_common_boundaries_are_conserved(
    theirs: list[tuple[int, float]], ours: list[tuple[int, float]]
) -> None:
    ends, policy_ends = ends_of(theirs), ends_of(ours)
    teacher, policy = (torch.tensor([value for _, value in one], dtype=torch.float64) for one in (theirs, ours))
    found, boundary = shared_out(teacher, ends, policy, policy_ends)
    common = sorted({*ends.tolist()} & {*policy_ends.tolist()})
    assert boundary.tolist() == [end in common for end in policy_ends.tolist()]
    before = -1
    for end in common:
        mine, its = (one <= end for one in (policy_ends, ends))
        piece = found[mine & (policy_ends > before)]
        assert float(piece.sum()) == pytest.approx(float(teacher[its & (ends > before)].sum()), abs=1e-9)
        assert (piece <= 1e-12).all()
        before = end
    assert found[policy_ends > before].isnan().all()
    if common:
        read = policy_ends <= before
        assert float(found[read].sum()) == pytest.approx(float(teacher[ends <= before].sum()), abs=1e-9)


@given(tokens=TEXTS)
def test_the_same_tokens_keep_their_log_probs_where_each_has_bytes(tokens: list[tuple[int, float]]) -> None:
    tokens = [(size + 1, value) for size, value in tokens]
    teacher, ends = torch.tensor([value for _, value in tokens], dtype=torch.float64), ends_of(tokens)
    found, boundary = shared_out(teacher, ends, teacher.roll(1) - 0.1, ends)
    torch.testing.assert_close(found, teacher)
    assert boundary.all()


def test_a_piece_is_shared_out_in_proportion_to_the_policys_own_log_probs() -> None:
    teacher, ends = torch.tensor([-3.0, -1.0]), torch.tensor([2, 3])
    found, boundary = shared_out(teacher, ends, torch.tensor([-0.5, -1.0, -2.0]), torch.tensor([1, 2, 3]))
    assert found.tolist() == pytest.approx([-1.0, -2.0, -1.0])
    assert boundary.tolist() == [False, True, True]
    even, _ = shared_out(teacher, ends, torch.zeros(3), torch.tensor([1, 2, 3]))
    assert even.tolist() == pytest.approx([-1.5, -1.5, -1.0])


def test_a_response_that_is_cut_within_a_character_is_read_up_to_it(model: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "cut", vocab_size=160)
    write_cut_tokenizer(folder, 160)
    policy, teacher = load_tokenizer(str(folder)), merging()
    reader = TextReader.of(policy, [policy.eos_token_id], teacher, teacher.eos_token_id)
    ids = policy("éé", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4
    whole, cut = reader.read([*ids, policy.eos_token_id]), reader.read(ids[:-1])
    assert (whole.policy_ends[-1], whole.ends[-1], whole.tokens[-1]) == (5, 5, teacher.eos_token_id)
    assert list(cut.policy_ends) == [1, 2]
    assert cut.ends[-1] == 2


def test_a_space_that_is_put_in_front_is_no_part_of_the_text_and_another_text_is_not_read(model: str) -> None:
    policy, spaced = load_tokenizer(model), merging(prefix=True)
    reader = TextReader.of(policy, [policy.eos_token_id], spaced, spaced.eos_token_id)
    ids = policy("1+2=3", add_special_tokens=False)["input_ids"]
    found = reader.read(ids)
    assert (found.ends[-1], found.policy_ends[-1]) == (5, 5)
    assert reader.read([*ids, 120, *ids]).policy_ends == found.policy_ends  # 120 is no token of its tokenizer
    lower = TextReader.of(policy, [], merging(), 0)
    changed = TextReader(
        meant=lower.meant,
        stops=frozenset(),
        theirs=lower.theirs,
        end=0,
        tokenize=lambda text: lower.tokenize(text + "!"),
    )
    assert changed.read(ids).policy_ends == ()


def test_a_teacher_reads_its_own_tokens_of_the_same_text(
    model: str, teacher: str, registry: Registry, tmp_path: Path
) -> None:
    """Sums over each response are those of plain transformers with the teacher's tokens; the gap falls."""
    flags = ("--trainer.updates_per_step", "1", "--train.optim.lr", "3e-3", "--trainer.samples_per_prompt", "8")
    config = alone(model, registry, 8, [{"path": teacher, "align": "text"}], *flags)
    view, batches = trained(config, registry, tmp_path / "run")
    batch, policy, own = batches[0], load_tokenizer(model), load_tokenizer(teacher)
    plain = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    questions = [json.loads(line)["question"] for line in Path(TASK[1]).read_text().splitlines()]
    read = {tuple(policy(text, add_special_tokens=False)["input_ids"]): text for text in questions}
    checked = 0
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids, mask = batch["input_ids"][start:end], batch["response_mask"][start:end]
        answer = ids[mask].tolist()
        found = batch["teacher_log_probs"][start:end][mask]
        unknown = [at for at, token in enumerate(answer) if token >= len(policy)]
        assert found.isnan().tolist() == [bool(unknown) and at >= unknown[0] for at in range(len(answer))]
        if unknown:
            continue
        ended = answer[-1] == policy.eos_token_id
        texts = [read[tuple(ids[~mask].tolist())], policy.decode(answer[:-1] if ended else answer)]
        prompt, response = (
            own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts
        )
        response = [*response, *[own.eos_token_id] * ended]
        with torch.no_grad():
            logs = plain(torch.tensor([[*prompt, *response]])).logits[0, :-1].log_softmax(-1)
        expected = logs.gather(-1, torch.tensor([*prompt, *response])[1:, None])[len(prompt) - 1 :, 0].sum()
        assert float(found.sum()) == pytest.approx(float(expected), rel=1e-4, abs=1e-3)
        checked += len(response) != len(answer)
    assert checked > 0
    first = view.steps[0]
    assert 0.3 < first["teacher/share"] < 1.0
    assert 0.3 < first["teacher/aligned"] < 1.0
    assert sum(step["teacher/gap"] for step in view.steps[-3:]) < sum(step["teacher/gap"] for step in view.steps[:3])


def test_what_cannot_be_aligned_is_refused(model: str, teacher: str, registry: Registry, tmp_path: Path) -> None:
    def refused(given: dict[str, Any], match: str, *flags: str) -> None:
        with pytest.raises(ConfigError, match=match):
            alone(model, registry, 1, [{"path": teacher, "align": "text", **given}], *flags)

    refused({}, "expected 'sampled', because teachers.0.align is 'text'", "--algorithm.distillation.objective", "top_k")
    refused({"path": None, "prompt_template": "{prompt}"}, "text belongs to a teacher with a tokenizer of its own")
    refused({"rollout": {}}, r"rollout.max_model_tokens: is required with align 'text'")
    tokens = alone(model, registry, 1, [{"path": teacher}])
    with (
        pytest.raises(ConfigError, match="its tokenizer is not the policy's"),
        trainer_of(tokens, registry, tmp_path / "run", Recorder()),
    ):
        pass
    batch = Batch.from_rows([[1, 2, 3, 4]], uid=torch.tensor([7]))
    batch = batch.with_tokens(response_mask=torch.tensor([False, True, False, True]))
    reader = TextReader.of(load_tokenizer(model), [], load_tokenizer(teacher), 0)
    with pytest.raises(BatchError, match="is not its prompt and a response: a teacher with align 'text'"):
        OwnText(reader, {7: ([1], [5])}).read(batch)
