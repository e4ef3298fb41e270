"""What passes through Megatron's layers take in memory: counted from what each operation keeps for its gradient.

Held against measured memory for its layers without Transformer Engine; with it, counted from what its kernels are
documented to keep, and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import DTYPE_BYTES, TrainSpec
from rlsdk.kit.kv_cache import head_size
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.sizes import CHUNK_ELEMENTS, Place, expert_tensor_size, padded_vocabulary

LOGIT_COPIES = 4
"""Of a chunk's float32 logits at once: as they come, as log-probs, as probabilities, and both multiplied."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Numbers of one micro-batch, on one rank. All sizes are in bytes."""

    layer_kept: int
    """By one layer, from its forward to its backward pass, without recomputation."""
    layer_works: int
    """At the peak of one layer's work, besides: what is there only while it runs."""
    layer_input: int
    recompute: str
    layers: int
    """Of one chunk of layers."""
    head: int
    """At the peak of logits and log-probs, on the last stage."""
    hidden: int
    """Of hidden states that stand whole at the head."""
    chunks: int
    stages: int
    passes: int

    @classmethod
    def of(
        cls,
        config: Any,
        spec: TrainSpec,
        options: MegatronOptions,
        *,
        rows: int,
        row_tokens: int,
        passes: int,
        device: str,
    ) -> Activations:
        """Of `rows` rows of `row_tokens` tokens in each of `passes` micro-batches."""
        width, ranks = DTYPE_BYTES[spec.model.dtype], options.tensor_parallel
        fused = device != "cpu" and options.transformer_engine != "never"
        length = -(-row_tokens // options.context_parallel)
        tokens, hidden = rows * length, config.hidden_size
        beside = hidden // (ranks if options.sequence_parallel else 1)
        heads = config.num_attention_heads // ranks
        queries = heads * head_size(config)
        keys = max(config.num_key_value_heads // ranks, 1) * head_size(config)
        shares = config.num_key_value_heads < config.num_attention_heads
        inner, expert_tokens = _inner(config, options)
        # Only where keys of other ranks are gathered is there a mask, and on a CPU scores with it.
        whole = not fused and options.context_parallel > 1
        scores = rows * heads * length * row_tokens if whole else 0
        attention = 2 * queries + 2 * (queries if whole else keys)
        norms = (4 if fused else 6) * beside
        mlp = (3 if fused else 4) * inner + 2 * expert_tokens * hidden
        kept = width * tokens * (norms + attention + mlp)
        probabilities = scores * (4 + (width if width < 4 else 0))
        works = width * tokens * max(5 * inner, attention + (2 * queries + 2 * keys if shares else 0))
        if options.recompute != "selective":
            kept += probabilities
        full = options.recompute == "full" or (options.recompute == "auto" and spec.activation_checkpointing)
        vocabulary = padded_vocabulary(config.vocab_size, ranks) // ranks
        logits = min(tokens * vocabulary, max(CHUNK_ELEMENTS, vocabulary))
        return cls(
            layer_kept=kept,
            layer_works=max(works, 3 * scores * 4),
            layer_input=width * tokens * beside,
            recompute="full" if full else options.recompute,
            layers=config.num_hidden_layers // (options.pipeline_parallel * options.virtual_stages),
            head=logits * (4 * LOGIT_COPIES + (width if width < 4 else 0)),
            hidden=width * tokens * hidden,
            chunks=options.virtual_stages,
            stages=options.pipeline_parallel,
            passes=passes,
        )

    def forward_bytes(self, place: Place) -> int:
        """At the peak of a pass without gradient."""
        head = self.head + self.hidden if self._is_last(place) else 0
        return 2 * self.layer_input + max(self.layer_works + self.layer_kept, head)

    def backward_bytes(self, place: Place) -> int:
        """At the peak of an update."""
        held = (
            self._chunks_held(place) * self.layers * (self.layer_input if self.recompute == "full" else self.layer_kept)
        )
        again = self.layer_kept if self.recompute == "full" else 0
        head = self.head + 3 * self.hidden if self._is_last(place) else 0
        return held + 2 * self.layer_input + max(again + self.layer_works, head)

    def _is_last(self, place: Place) -> bool:
        return place.pp_rank == self.stages - 1

    def _chunks_held(self, place: Place) -> int:
        """Chunks of layers that wait for their backward pass at most, as Megatron's schedules warm up."""
        after = self.stages - place.pp_rank - 1
        if self.chunks == 1:
            return min(after + 1, self.passes)
        return min(2 * after + (self.chunks - 1) * self.stages + 1, self.passes * self.chunks)


def _inner(config: Any, options: MegatronOptions) -> tuple[int, int]:
    """(inner elements of a layer's MLP for each token of this rank, how often a token's hidden state is copied for
    experts)."""
    if not getattr(config, "num_experts", None):
        return config.intermediate_size // options.tensor_parallel, 0
    # A token goes to so many experts, wherever they are; as many come from other ranks as go there.
    times = config.num_experts_per_tok
    share = expert_tensor_size(options)
    tokens = 1 / options.tensor_parallel if options.expert_parallel > 1 and options.sequence_parallel else 1
    return int(times * config.moe_intermediate_size / share * tokens), times
