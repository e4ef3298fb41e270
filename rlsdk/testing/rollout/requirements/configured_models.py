"""Requirements: models whose configurations have windows, scales, caps or experts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlsdk.interfaces import Capability, ConfigError
from rlsdk.testing.process.models import ROUTED, ROUTED_GLM, write_tiny_model
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.draw_statistics import DrawStatistics
from rlsdk.testing.rollout.lab import RolloutLab, whole_shards
from rlsdk.testing.rollout.memory_layouts import MEMORY_LAYOUTS, cut_at_random
from rlsdk.testing.rollout.random_events import FEW_EVENTS, Life
from rlsdk.testing.suites.requirements import NOT_CLAIMED, Measured, requirement

LONGEST = 4171
"""Context length of two of the models: beyond 512, 1024, 2048 and 4096, where engines split prompts into chunks; beyond
the positions that half precision distinguishes; and not a multiple of a block size."""
POSITIONS = 4224
"""Context length in the configuration of these models."""
ROOM = 509
"""Context length of the other models: also not a multiple of a block size."""
FAR = (1010, 4150)
"""Lengths of long prompts: one response crosses such a border, and one begins after all of them and ends at the context
length."""
FAMILIES = ("llama", "qwen3", "qwen2")
"""Families in order of preference: the first that the backend runs is used."""
WINDOWED, WINDOW, SCALED = ("qwen2", "qwen3"), 24, ("granite",)
"""Families with a configurable sliding window, and families that scale their logits."""
WINDOWS: Mapping[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
"""Configuration of a model with sliding windows."""
SCALES: Mapping[str, Any] = {
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "max_position_embeddings": POSITIONS,
    **{"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
}
"""Configuration of a model with scaled positions and logits."""
CAPPED: Mapping[str, Any] = {
    "final_logit_softcapping": 3.0,
    # The reference, torch's plain attention, does not cap scores.
    "attn_logit_softcapping": None,
    "query_pre_attn_scalar": 32,
    # Under both names, as in the files of such models: engines read one or the other.
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    # As in every such model: some engines support no other value.
    "tie_word_embeddings": True,
}
"""Configuration of a model whose logits pass through a tanh."""
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {**ROUTED_GLM, "norm_topk_prob": False},
    "deepseek_v3": {**ROUTED, "norm_topk_prob": False},
    "qwen3_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False},
        "num_key_value_heads": 4,
    },
}
"""Mixtures of experts whose weights do not add up to 1; the router of all but the last has a bias. The first that the
backend runs is used."""
DEFAULTS = {
    **{"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.3, "repetition_penalty": 1.5},
    **{"max_new_tokens": 7, "max_length": 11, "no_repeat_ngram_size": 2, "suppress_tokens": [*range(20, 90)]},
    **{"eos_token_id": [*range(40, 60)]},
}
"""A model's `generation_config.json`."""
NARROW = 227
"""Vocabulary of the models with unusual configurations: not a multiple of a block size, and so small that padding by an
engine shows in every log-prob."""


class ConfiguredModelRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("model.configuration", since=(2, 0))
    def test_model_configuration(self, lab: RolloutLab, measured: Measured) -> None:
        """A model with sliding windows gives the right log-probs for prompts and responses longer than the window, or
        is refused with a ConfigError at the start. Limits, filters and penalties in `generation_config.json` are
        ignored, because requests contain their own; so are dropout and the files' dtype, bfloat16. An engine may decode
        only one sample concurrently, and neither its context length nor its vocabulary need be a multiple of a block
        size. An untied head may equal the embeddings at first: an update makes them differ. Calls and events in random
        order keep to all of this."""
        _try_configured(lab, measured, "sliding windows", WINDOWED, WINDOWS, slots=1)

    @requirement("model.scaled", since=(2, 0))
    def test_model_scaled(self, lab: RolloutLab, measured: Measured) -> None:
        """As `model.configuration`, of a model with scaled rotary positions, and scaled logits if the backend runs such
        a family: also after thousands of tokens, and with several samples at once."""
        _try_configured(lab, measured, "scaled positions and logits", (*SCALED, *FAMILIES), SCALES)

    @requirement("model.capped", since=(2, 0))
    def test_model_capped(self, lab: RolloutLab, measured: Measured) -> None:
        """A model that caps its logits by a tanh gives log-probs of the capped logits and draws from them, also after
        calls and events in random order, or is refused with a ConfigError at the start."""
        known = lab.spec.architectures
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        if known is not None and "gemma2" not in known:
            return measured.record("models tried", 0)
        folder = _configured_model(lab.scratch.parent / "capped-model", "gemma2", CAPPED)
        tried = _tried_model(RolloutLab(lab.suite, folder, lab.scratch), "capped logits", measured)
        return measured.record("models tried", tried)

    @requirement("model.experts", since=(2, 0))
    def test_model_experts(self, lab: RolloutLab, measured: Measured) -> None:
        """A mixture of experts whose weights do not add up to 1, and whose router has a bias, which a model keeps as a
        buffer, is served with the latest weights after every update, whole or in pieces, and after every sleep, or
        refused with a ConfigError at the start."""
        known = lab.spec.architectures
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        for family, shape in ROUTERS.items():
            if known is not None and family not in known:
                continue
            folder = lab.scratch.parent / f"{family}-model"
            if not folder.exists():
                write_tiny_model(folder, architecture=family, seed=2, sharpness=2.0, **shape)
            other = RolloutLab(lab.suite, folder, lab.scratch)
            try:
                if _routes(other, family, measured):
                    return measured.record("models tried", 1)
            finally:
                other.close()
        return measured.record("models tried", 0)


def _try_configured(
    lab: RolloutLab, measured: Measured, name: str, families: Sequence[str], fields: Mapping[str, Any], slots: int = 8
) -> None:
    """Measures samples of a model with an unusual configuration, of the first family that the backend runs."""
    if not lab.spec.takes_weights:
        pytest.skip(f"{NOT_CLAIMED}takes_weights")
    known = lab.spec.architectures
    family = next((one for one in families if known is None or one in known), None)
    if family is None:
        return measured.record("models tried", 0)
    folder = _configured_model(lab.scratch.parent / f"{name.replace(' ', '-')}-model", family, fields)
    other, is_long = RolloutLab(lab.suite, folder, lab.scratch), "max_position_embeddings" in fields
    return measured.record("models tried", _tried_model(other, name, measured, slots=slots, is_long=is_long))


def _tried_model(other: RolloutLab, name: str, measured: Measured, *, slots: int = 8, is_long: bool = False) -> bool:
    """Measures samples of a model, with `is_long` also after thousands of tokens. Returns False if the engine refuses
    it.

    Args:
        other: lab of the model.
        name: name of the model in reports.
        measured: records the numbers.
        slots: `max_running`; 1: fewer samples, because they run one after the other.
        is_long: the model has a context of `LONGEST` tokens.
    """
    room, n = LONGEST if is_long else ROOM, min(slots, 2)
    try:
        try:
            engine = other.start(max_running=slots, max_model_tokens=room)
        except ConfigError:
            return False
        try:
            requests = [
                other.ask(f"r{at}", other.prompt(length, 245), n, max_tokens=2 * WINDOW, temperature=float(at % 2))
                for at, length in enumerate((2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW))
            ]
            requests.append(other.ask("drawn", other.prompt(6, 246), 12 * n - 8, max_tokens=30))
            if is_long:
                far = [other.ask(f"behind {length}", other.prompt(length, 249), max_tokens=30) for length in FAR]
            else:
                far = [other.ask(f"{left} left", other.prompt(room - left, 249), max_tokens=30) for left in (1, 14)]
            asked = [*requests, *far]
            faults, samples = audit(other, asked, other.run(asked, engine), room=room)
            measured.none(f"wrong samples, {name}", faults)
            measured.none(f"draws that follow something else, {name}", DrawStatistics.of(samples, other.eos).faults())
            # An update must recompute tensors that are derived from weights.
            state = other.changed(83)
            engine.update_weights(whole_shards(state), 3)
            newer = other.plain.with_state(state)
            faults, _ = audit(other, requests, other.run(requests, engine), newer, version=3, room=room)
            measured.none(f"wrong samples after an update, {name}", faults)
            engine.update_weights(whole_shards(other.base), 0)
            Life(other, engine, len(name), room=min(room, ROOM)).run(measured, f"random calls, {name}", FEW_EVENTS)
            other.verify(measured)
        finally:
            engine.close()
    finally:
        other.close()
    return True


def _configured_model(folder: Path, family: str, fields: Mapping[str, Any]) -> Path:
    """A model with an unusual configuration, whose folder has its own sampling defaults."""
    if not folder.exists():
        shape = {"num_key_value_heads": 4, "attention_dropout": 0.5, "vocab_size": NARROW, **fields}
        write_tiny_model(folder, architecture=family, seed=9, stored="bfloat16", **shape)
        (folder / "generation_config.json").write_text(json.dumps(DEFAULTS), encoding="utf-8")
        _equalize_head(folder / "model.safetensors")
    return folder


def _equalize_head(file: Path) -> None:
    """Gives an untied head the values of the embeddings: two separate tensors that are equal at the start."""
    tensors = load_file(file)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file, metadata={"format": "pt"})


def _routes(other: RolloutLab, kind: str, measured: Measured) -> bool:
    """Measures few samples of a mixture of experts, because rounding decides between experts of equal score. Returns
    False if the engine refuses the model."""
    requests = [other.ask(f"r{at}", other.prompt(4 + 5 * at, 250), 2, max_tokens=12) for at in range(4)]
    moved = dict(other.base)
    for name in [name for name in moved if name.endswith("correction_bias")]:
        moved[name] = moved[name].flip(-1)
    try:
        engine = other.start(max_running=8)
    except ConfigError:
        return False
    try:
        states = {"the first weights": other.base, "other biases": moved, "other weights": other.changed(84)}
        sleeps = (1, 2) if Capability.SLEEP in other.spec.capabilities else ()
        states |= {f"weights that came after a sleep at {level}": other.changed(84 + level) for level in sleeps}
        states["the first weights, kept in a sleep"] = other.base
        for version, (name, state) in enumerate(states.items()):
            if "after" in name:
                engine.sleep(int(name[-1]))
                engine.wake()
            if version:
                exact = MEMORY_LAYOUTS["inside of another"]  # float64
                engine.update_weights((whole_shards(state), cut_at_random(state, exact, version))[version % 2], version)
            if "kept" in name and sleeps:
                engine.sleep(1)
                engine.wake()
            faults, _ = audit(
                other, requests, other.run(requests, engine), other.plain.with_state(state), version=version
            )
            measured.none(f"wrong samples, {kind}, {name}", faults)
    finally:
        engine.close()
    return True
