"""Tokenizers made on the spot give back the text they were given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.kit.model.tokenizers import write_byte_tokenizer, write_char_tokenizer

CHARACTERS = "abc XYZ0123456789.,!?>\n\t'\"é#"


@pytest.fixture(scope="module")
def by_character(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("characters")
    write_char_tokenizer(folder, CHARACTERS)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def by_byte(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return load_tokenizer(str(folder))


@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_characters_come_back_exactly_one_token_each(by_character: PreTrainedTokenizerBase, text: str) -> None:
    ids = by_character(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert by_character.decode(ids) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_exactly_one_token_per_byte(by_byte: PreTrainedTokenizerBase, text: str) -> None:
    # The names of special tokens stand for those tokens, in any tokenizer.
    assume(not any(name in text for name in ("<pad>", "<eos>", "<unk>")))
    ids = by_byte(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode("utf-8"))
    assert by_byte.decode(ids) == text


def test_special_tokens_are_distinct_and_skipped_when_asked(by_character: PreTrainedTokenizerBase) -> None:
    pad, eos, unk = by_character.pad_token_id, by_character.eos_token_id, by_character.unk_token_id
    assert len({pad, eos, unk}) == 3
    assert by_character.decode([*by_character("abc")["input_ids"], eos, pad], skip_special_tokens=True) == "abc"


def test_unknown_characters_become_unk(by_character: PreTrainedTokenizerBase) -> None:
    assert by_character("aöb")["input_ids"][1] == by_character.unk_token_id


def test_lower_casing_happens_before_encoding(tmp_path: Path) -> None:
    tokenizer = write_char_tokenizer(tmp_path, "abc>", lowercase=True)
    assert tokenizer.decode(tokenizer("aBC>")["input_ids"]) == "abc>"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "phi3", "mistral"])
def test_the_kind_of_model_beside_it_changes_nothing(tmp_path: Path, model_type: str) -> None:
    """transformers rebuilds the tokenizer of some kinds (qwen2) from the vocabulary alone: "C" vanished."""
    written = write_char_tokenizer(tmp_path, "abc>", lowercase=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    read = load_tokenizer(str(tmp_path))
    for text in ("aBC>", "a?b", "a b", "e\u0301", ""):
        assert read(text)["input_ids"] == written(text)["input_ids"]


def test_the_vocabulary_counts_each_character_once(tmp_path: Path) -> None:
    assert len(write_char_tokenizer(tmp_path, "aab")) == 3 + 2


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))
