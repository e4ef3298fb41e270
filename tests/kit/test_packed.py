"""Packed rows and padded rectangles are the same function, for every kind of layer that packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rlsdk.interfaces import Batch, ConfigError, Head, ModelSpec
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import compute_outputs
from rlsdk.kit.model.packed import ATTENTION, can_pack, packed_attention, window_for_mask
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.reference import load_plain_model, plain_outputs

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding window": ("MistralConfig", {"sliding_window": 4}),
    "a window that its attention is not told": ("PhimoeConfig", {"sliding_window": 5, "num_local_experts": 4}),
    "score cap, final cap, windows in turn": (
        "Gemma2Config",
        {"sliding_window": 6, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "attention sinks, experts": (
        "GptOssConfig",
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "learned positions": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "values wider than keys": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "multiplied logits": ("CohereConfig", {"logit_scale": 0.3}),
    "divided logits": ("GraniteConfig", {"logits_scaling": 2.0}),
    "a stack inside the backbone": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
NOT_OF = {"GPT2Config": ("num_key_value_heads", "head_dim"), "DeepseekV3Config": ("head_dim",)}


def write_model(folder: Path, config_class: str, **extra: Any) -> str:
    fields = {**SHAPE, **extra}
    fields = {name: value for name, value in fields.items() if name not in NOT_OF.get(config_class, ())}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**fields))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def ragged() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_rows([torch.randint(2, 64, (n,), generator=generator).tolist() for n in (1, 3, 17, 9, 2, 30, 4)])


def related() -> Batch:
    """Rows with a common prefix, as samples of a prompt have; two are equal, and one is the prefix of another."""
    ids = ragged()["input_ids"].tolist()
    prompt, other = ids[:9], ids[20:23]
    ends = [ids[30:34], ids[30:36], [*ids[30:33], 2], ids[40:41], ids[30:36], []]
    return Batch.from_rows([*(prompt + end for end in ends), other, other + ids[50:60], [7]])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_its_own_eager_attention_in_both_forms(family: str, tmp_path: Path) -> None:
    config_class, extra = FAMILIES[family]
    path = write_model(tmp_path, config_class, **extra)
    model = build_model(ModelSpec(path=path))
    assert can_pack(model)
    plain = load_plain_model(path, attn_implementation="eager")
    with torch.no_grad():
        for batch in (ragged(), related()):
            expected = plain_outputs(plain, batch)["log_probs"]
            for packed in (False, True):
                found = compute_outputs(model, Head.LM, batch, ("log_probs",), packed=packed)["log_probs"]
                torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


def test_recurrent_models_run_as_rectangles_and_refuse_to_pack(tmp_path: Path) -> None:
    path = write_model(tmp_path, "RecurrentGemmaConfig", block_types=["recurrent", "attention"], lru_width=64)
    model, batch = build_model(ModelSpec(path=path)), ragged()
    assert model.config._attn_implementation != ATTENTION
    with torch.no_grad():
        found = compute_outputs(model, Head.LM, batch, ("log_probs",))["log_probs"]
        expected = plain_outputs(load_plain_model(path), batch)["log_probs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
    with pytest.raises(ConfigError, match="cannot run packed rows"):
        compute_outputs(model, Head.LM, batch, ("log_probs",), packed=True)


@pytest.mark.parametrize("name", ["position_bias", "block_indices"])
def test_attention_that_cannot_be_computed_is_refused_by_name(tiny: nn.Module, name: str) -> None:
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=rf"passes \['{name}'\] to its attention"):
        packed_attention(tiny, heads, heads, heads, None, **{name: torch.zeros(1)})


def test_masks_by_rules_of_a_models_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="by rules of its own"):
        window_for_mask(use_vmap=True)


def test_a_model_that_says_it_keeps_state_is_not_packed(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_pack(tiny)
    monkeypatch.setattr(type(tiny), "_is_stateful", True)
    assert not can_pack(tiny)


def tokens_through_linear_layers(model: nn.Module, batch: Batch, packed: bool | None) -> set[int]:
    """Number of tokens that each linear layer below the head saw."""
    seen: set[int] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[:-1].numel()))
        for module in model.model.modules()  # type: ignore[union-attr]
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        compute_outputs(model, Head.LM, batch, ("log_probs",), packed=packed)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return build_model(ModelSpec(path=str(write_tiny_model(tmp_path_factory.mktemp("tiny")))))


def test_packed_rows_carry_no_padding_through_linear_layers(tiny: nn.Module) -> None:
    batch = ragged()
    # Nothing follows a row's last token, so it is left out.
    assert tokens_through_linear_layers(tiny, batch, True) == {batch.num_tokens - batch.num_rows}


def test_the_cheapest_form_is_packed_for_ragged_rows_and_a_rectangle_for_even_ones(tiny: nn.Module) -> None:
    even = Batch.from_rows([[first] * n for first, n in ((5, 11), (6, 12), (7, 12), (8, 12))])
    assert tokens_through_linear_layers(tiny, ragged(), None) == {ragged().num_tokens - ragged().num_rows}
    assert tokens_through_linear_layers(tiny, even, None) == {4 * 11}


def test_what_rows_share_goes_through_linear_layers_once(tiny: nn.Module) -> None:
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [5, 6, 7, 4, 4], [5, 6, 7, 8, 9], [6, 5, 7]]
    assert tokens_through_linear_layers(tiny, Batch.from_rows(rows), None) == {5 + 2}


def test_rows_do_not_see_each_other(tiny: nn.Module) -> None:
    first, second, other = [5, 6, 7, 8], [9, 10, 11], [3, 3, 3]
    run = [
        compute_outputs(tiny, Head.LM, Batch.from_rows([first, last]), ("log_probs",), packed=True)["log_probs"]
        for last in (second, other)
    ]
    assert torch.equal(run[0][:4], run[1][:4])
    assert not torch.equal(run[0][4:], run[1][4:])


def test_keys_of_a_cache_are_refused_and_not_taken_for_a_row(tmp_path: Path) -> None:
    """The causal mask of one new token over many keys would let it see the first one only."""
    model = build_model(ModelSpec(path=str(write_tiny_model(tmp_path / "tiny"))))
    found = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True)
    with pytest.raises(ConfigError, match=r"1 new positions came with 4 keys: .*set_attn_implementation\('sdpa'\)"):
        model(input_ids=torch.tensor([[8]]), past_key_values=found.past_key_values, use_cache=True)
