"""Activation memory of Megatron's layers, counted from the tensors that each operation saves for its gradient.

For layers without Transformer Engine the counts were compared with measured memory. With Transformer Engine they follow
the documentation of its kernels and were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import DTYPE_BYTES, TrainSpec
from rlsdk.kit.memory.kv_cache import head_size
from rlsdk.kit.model.logit_chunks import chunk_tokens
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.sizes import Place, expert_tensor_size, padded_vocabulary

LOGIT_COPIES = 4
"""Float32 tensors of one chunk's logits at the peak: logits, log-probs, probabilities, and the product of the last
two."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation memory of one micro-batch on one rank, in bytes."""

    layer_kept: int
    """Kept by one layer from its forward to its backward pass, without recomputation."""
    layer_works: int
    """Peak of one layer's temporary tensors, in addition to `layer_kept`."""
    layer_input: int
    recompute: str
    layers: int
    """Number of layers in one chunk."""
    head: int
    """Peak of logits and log-probs, on the last stage."""
    hidden: int
    """Hidden states at the head, with all positions of this context-parallel rank."""
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
        """For `passes` micro-batches, each with `rows` rows of `row_tokens` tokens."""
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
        # A mask, and on a CPU full scores, exist only if keys of other ranks are gathered.
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
        logits = min(tokens, chunk_tokens(vocabulary, device)) * vocabulary
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
        """Peak of a pass without gradient."""
        head = self.head + self.hidden if self._is_last(place) else 0
        return 2 * self.layer_input + max(self.layer_works + self.layer_kept, head)

    def backward_bytes(self, place: Place) -> int:
        """Peak of an update."""
        held = (
            self._chunks_held(place) * self.layers * (self.layer_input if self.recompute == "full" else self.layer_kept)
        )
        again = self.layer_kept if self.recompute == "full" else 0
        head = self.head + 3 * self.hidden if self._is_last(place) else 0
        return held + 2 * self.layer_input + max(again + self.layer_works, head)

    def _is_last(self, place: Place) -> bool:
        return place.pp_rank == self.stages - 1

    def _chunks_held(self, place: Place) -> int:
        """Largest number of chunks that wait for their backward pass, from the warm-up of Megatron's schedules."""
        after = self.stages - place.pp_rank - 1
        if self.chunks == 1:
            return min(after + 1, self.passes)
        return min(2 * after + (self.chunks - 1) * self.stages + 1, self.passes * self.chunks)


def _inner(config: Any, options: MegatronOptions) -> tuple[int, int]:
    """(elements of a layer's MLP per token of this rank, number of copies of a token's hidden state for experts)."""
    if not getattr(config, "num_experts", None):
        return config.intermediate_size // options.tensor_parallel, 0
    # Each token goes to this many experts on any rank; on average a rank receives as many tokens as it sends.
    times = config.num_experts_per_tok
    share = expert_tensor_size(options)
    tokens = 1 / options.tensor_parallel if options.expert_parallel > 1 and options.sequence_parallel else 1
    return int(times * config.moe_intermediate_size / share * tokens), times
