"""What reaches the model: rows split by position, or end to end; and what Transformer Engine is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlsdk.interfaces import Batch, ModelSpec, TrainSpec
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.inputs import one_row, own_positions
from rlsdk_megatron.modeling import packs_rows, transformer_config

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
    without = transformer_config(model, spec, options, CUDA)
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
