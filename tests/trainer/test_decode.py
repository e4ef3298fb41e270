"""Text of responses: what the tokenizer says, without the token that ended it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.kit.model.tokenizers import write_byte_tokenizer, write_char_tokenizer
from rlsdk.rollouts.groups.rollouter import without_stop
from rlsdk.trainer.inputs.codec import TokenCodec

IDS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5)


@pytest.fixture(scope="module", params=["characters", "bytes", "bytes, spaces cleaned up"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "characters":
        write_char_tokenizer(folder, "abc .,'")
    else:
        write_byte_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.clean_up_tokenization_spaces = request.param.endswith("up")
    return tokenizer


@given(rows=IDS)
def test_it_is_what_the_tokenizer_decodes_row_by_row(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> None:
    eos = tokenizer.eos_token_id
    expected = [tokenizer.decode(row[:-1] if row and row[-1] == eos else row) for row in rows]
    assert TokenCodec(tokenizer).decode_all([without_stop(row, (eos,)) for row in rows]) == expected
