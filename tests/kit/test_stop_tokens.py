"""Which tokens end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.hf import stop_token_ids
from rlsdk.kit.model.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return made


@pytest.mark.parametrize("listed", [[260, 1], 260, [260], None])
def test_the_generation_config_adds_its_own_to_that_of_the_tokenizer(
    tokenizer: Any, tmp_path: Path, listed: object
) -> None:
    end = tokenizer.eos_token_id
    extra = tokenizer.convert_tokens_to_ids("<|im_end|>")
    want = listed if listed is None else json.loads(json.dumps(listed).replace("260", str(extra)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": want}))
    assert stop_token_ids(tokenizer, str(tmp_path)) == ((end,) if listed is None else (end, extra))


def test_without_a_generation_config_it_is_the_tokenizer_s(tokenizer: Any, tmp_path: Path) -> None:
    assert stop_token_ids(tokenizer, str(tmp_path)) == (tokenizer.eos_token_id,)
    assert stop_token_ids(tokenizer, None) == (tokenizer.eos_token_id,)


def test_ids_that_the_tokenizer_does_not_have_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, -1]}')
    assert stop_token_ids(tokenizer, str(tmp_path)) == (tokenizer.eos_token_id,)


def test_what_is_configured_replaces_both(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    extra = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tokenizer, str(tmp_path), ["<|im_end|>", 7, extra]) == (extra, 7)


@pytest.mark.parametrize(
    ("configured", "told"),
    [(["<|im_ende|>"], r"did you mean '<\|im_end\|>'"), ([10**6], "not a token"), ([], "is empty")],
)
def test_what_is_no_token_is_refused(tokenizer: Any, configured: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.stop_token_ids: .*{told}"):
        stop_token_ids(tokenizer, None, configured)


def test_a_generation_config_that_makes_no_sense_is_named(tokenizer: Any, tmp_path: Path) -> None:
    for text in ('{"eos_token_id": ["x"]}', "[]", "{"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            stop_token_ids(tokenizer, str(tmp_path))


def test_no_stop_token_at_all_is_refused(tmp_path: Path) -> None:
    made = write_byte_tokenizer(tmp_path)
    made.eos_token = None
    with pytest.raises(ConfigError, match=r"rollout\.stop_token_ids"):
        stop_token_ids(made, None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert stop_token_ids(made, str(tmp_path)) == (3,)
