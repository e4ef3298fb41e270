"""What reaches the model: rows split by position, or end to end; and what Transformer Engine is asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlsdk.interfaces import Batch, ConfigError, ModelSpec, TrainSpec
from rlsdk_megatron.attention import CausalAttention
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.inputs import one_row, own_positions
from rlsdk_megatron.modeling import packs_rows, transformer_config, uses_transformer_engine

CUDA = torch.device("cuda")


def test_rows_end_to_end_know_their_limits_and_their_padding_is_a_row_of_its_own() -> None:
    given = one_row(Batch.from_rows([[5, 6, 7], [8], [9, 3]]), 8)
    assert given.ids.tolist() == [[5, 6, 7, 8, 9, 3, 0, 0]]
    assert given.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert given.future is None
    assert given.packed is not None
    assert given.packed.qkv_format == "thd"
    assert given.packed.cu_seqlens_q.tolist() == given.packed.cu_seqlens_kv.tolist() == [0, 3, 4, 6, 8]
    assert given.packed.cu_seqlens_q.dtype is torch.int32
    assert given.packed.max_seqlen_q == 3
    assert given.places.tolist() == list(range(6))


def test_without_padding_the_last_row_ends_the_limits() -> None:
    packed = one_row(Batch.from_rows([[5, 6], [7, 8]]), 4).packed
    assert packed is not None
    assert packed.cu_seqlens_q.tolist() == [0, 2, 4]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_context_ranks_hold_every_position_once_from_both_ends(size: int) -> None:
    held = [own_positions(12, rank, size, torch.device("cpu")).tolist() for rank in range(size)]
    assert sorted(at for one in held for at in one) == list(range(12))
    assert {len(one) for one in held} == {12 // size}
    if size == 2:
        assert held == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("options", "packs"),
    [({}, True), ({"context_parallel": 2}, False), ({"pipeline_parallel": 2, "virtual_stages": 2}, False)],
)
def test_only_whole_rows_of_free_shape_are_packed(options: dict[str, int], packs: bool) -> None:
    assert packs_rows(MegatronOptions(**options)) is packs


def test_on_cuda_the_kernels_of_transformer_engine_are_asked_for_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configuration alone: nothing of it runs here."""
    model = SimpleNamespace(
        model_type="qwen2", hidden_act="silu", num_hidden_layers=4, hidden_size=128, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, head_dim=32,
    )  # fmt: skip
    spec = TrainSpec(model=ModelSpec(path="m", dtype="bfloat16"), micro_batch_rows=1)
    options = MegatronOptions(tensor_parallel=2, sequence_parallel=True, context_parallel=2)
    never = replace(options, transformer_engine="never", context_parallel=1)
    without = transformer_config(model, spec, never, CUDA)
    monkeypatch.setattr("megatron.core.models.gpt.gpt_layer_specs.HAVE_TE", True)
    # Megatron looks whether the kernel is there, and calls nothing yet.
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", object())
    engine = transformer_config(model, spec, options, CUDA)
    for name in ("persist_layer_norm", "masked_softmax_fusion", "apply_rope_fusion"):
        assert getattr(engine, name)
        assert not getattr(without, name)
    assert engine.context_parallel_size == 2
    assert engine.sequence_parallel
    assert engine.bf16
    assert not engine.use_cpu_initialization


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return found


def heads(length: int, heads: int, seed: int) -> torch.Tensor:
    """`[T, 1, heads, 8]`."""
    return torch.randn(length, 1, heads, 8, generator=torch.Generator().manual_seed(seed))


def test_attention_without_transformer_engine_makes_nothing_of_the_square_of_the_length() -> None:
    length = 1024
    batch = Batch.from_rows([list(range(1, length + 1))])
    query, key, value = heads(length, 4, 0).requires_grad_(), heads(length, 2, 1), heads(length, 2, 2)
    with Largest() as largest:
        given = one_row(batch, length)
        found = CausalAttention(None)(query, key, value, given.future)
        found.sum().backward()
    assert largest.numel < length * length / 8
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key.repeat_interleave(2, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    wanted = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value.repeat_interleave(2, 2)).flatten(2)
    torch.testing.assert_close(found, wanted)


def test_rows_end_to_end_attend_to_themselves_alone() -> None:
    rows = [list(range(1, n + 1)) for n in (5, 1, 9)]
    given = one_row(Batch.from_rows(rows), 16)
    query, key, value = (heads(16, n, seed)[:, 0] for n, seed in ((4, 0), (2, 1), (2, 2)))
    attention = CausalAttention(None)
    found = attention(query, key, value, None, packed_seq_params=given.packed)
    start = 0
    for row in rows:
        own = slice(start, start + len(row))
        alone = attention(query[own, None], key[own, None], value[own, None], None)[:, 0]
        torch.testing.assert_close(found[own], alone)
        start += len(row)


def test_cuda_without_transformer_engine_is_refused_unless_a_run_asks_for_it() -> None:
    with pytest.raises(
        ConfigError, match=r"'auto': .* not installed; run `pip install 'transformer-engine\[pytorch\]>=2"
    ):
        uses_transformer_engine(MegatronOptions(), CUDA)
    assert not uses_transformer_engine(MegatronOptions(transformer_engine="never"), CUDA)
    with pytest.raises(ConfigError, match="context_parallel 2: on CUDA needs Transformer Engine"):
        uses_transformer_engine(MegatronOptions(transformer_engine="never", context_parallel=2), CUDA)
    assert not uses_transformer_engine(MegatronOptions(), torch.device("cpu"))
