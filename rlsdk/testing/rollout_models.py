"""Requirements: models, dtypes and sizes other than those of the suite's default model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    ConfigError,
    FinishReason,
    GenerationOutput,
    Head,
    ModelSpec,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    WeightShard,
    Workload,
    fingerprint,
)
from rlsdk.kit.hf import load_tokenizer
from rlsdk.testing.draw_statistics import DrawStatistics
from rlsdk.testing.forecasts import differences, senseless
from rlsdk.testing.models import ROUTED, ROUTED_GLM, add_code, code_ran, write_cut_tokenizer, write_tiny_model
from rlsdk.testing.modes import kept_modes
from rlsdk.testing.requirements import NOT_CLAIMED, Measured, requirement
from rlsdk.testing.resources import held, left_behind
from rlsdk.testing.rollout_audit import audit, samples_with_logits, wrong_end
from rlsdk.testing.rollout_capacity import running_together
from rlsdk.testing.rollout_lab import RolloutLab, pieces, whole_shards
from rlsdk.testing.rollout_outputs import wrong_identities
from rlsdk.testing.rollout_random_calls import FEW_EVENTS, Life
from rlsdk.testing.rollout_sources import MEMORY_LAYOUTS, cut_at_random

LONGEST = 4171
"""Context length of two of the models: beyond 512, 1024, 2048 and 4096, where engines split prompts into chunks; beyond
the positions that half precision distinguishes; and not a multiple of a block size."""
POSITIONS = 4224
"""Context length in the configuration of these models."""
ROOM = 509
"""Context length of the other models: also not a multiple of a block size."""
FILE_BYTES = 100_000
"""File size of a checkpoint with several files."""
FAR = (1010, 4150)
"""Lengths of long prompts: one response crosses such a border, and one begins after all of them and ends at the context
length."""
NEAR = 10
"""Length of the short prompt, with whose log-probs those of long prompts are compared."""
FAMILIES = ("llama", "qwen3", "qwen2")
"""Families in order of preference: the first that the backend runs is used."""
WINDOWED, WINDOW, SCALED = ("qwen2", "qwen3"), 24, ("granite",)
"""Families with a configurable sliding window, and families that scale their logits."""
CONFIGURED: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]] = {
    "sliding windows": (WINDOWED, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    "scaled positions and logits": (
        (*SCALED, *FAMILIES),
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
            "max_position_embeddings": POSITIONS,
            **{"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        },
    ),
}
"""Difference from the model of all other requirements -> families, of which the first that the backend runs is used,
and fields of the configuration."""
FARTHER = 4.0
"""Factor by which rounding may grow after that many tokens; in transformers it grows by half."""
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
ROUTERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "biased": {"deepseek_v3": ROUTED, "glm4_moe": ROUTED_GLM},
    "not normalised": {
        "qwen3_moe": {
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False},
            "num_key_value_heads": 4,
        },
    },
}
"""Mixtures of experts by what is special; of each, the first family that the backend runs is used."""
DEFAULTS = {
    **{"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.3, "repetition_penalty": 1.5},
    **{"max_new_tokens": 7, "max_length": 11, "no_repeat_ngram_size": 2, "suppress_tokens": [*range(20, 90)]},
    **{"eos_token_id": [*range(40, 60)]},
}
"""A model's `generation_config.json`."""
VOCABULARY = 1031
"""A prime vocabulary size: an engine that pads it must not draw padding. It is so large that a cumulative sum of
probabilities in half precision skips most tokens."""
WIDE = 98_407
"""A vocabulary of which a third of the token ids need more than 16 bits."""
NUM_KINDS, FEWER = 1000, 6.0
"""Number of first tokens among which distinct ones are counted, and the allowed deviation of that count in standard
deviations: less than one false alarm in a million."""
FEW = 3
"""`max_running` of that engine: so small that one more sample is a third more."""
LONG, FEW_OVERRUN = 120, 1.3
"""Tokens of the samples that measure this, and allowed factor of concurrent samples over `max_running`: tokens that an
engine decodes ahead of its caller are few compared with such responses."""
NARROW = 227
"""Vocabulary of the models with unusual configurations: not a multiple of a block size, and so small that padding by an
engine shows in every log-prob."""
HALF_ROUNDING = 0.05
"""Largest difference of log-probs of a float16 model with one layer."""
OUTLIER = 1000.0
"""Factor of hidden states, which are then as large as in some channels of language models: squares overflow float16."""
MEAN_ROUNDING, WORST_ROUNDING = 0.06, 0.8
"""Mean and largest difference of log-probs of a bfloat16 model from float32 with the same weights."""


class ModelRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("model.tied", since=(2, 0))
    def test_model_tied(self, lab: RolloutLab, measured: Measured) -> None:
        """A model of another family, with tied embeddings and an odd vocabulary, in bfloat16 if that is claimed:
        `layout` lists the tied tensor once with its other name, receipts cover the served weights in their dtype, an
        update changes both uses of the tensor, even after a sleep, and log-probs are float32. The number of distinct
        first tokens is right, and prompts of a thousand tokens are read as accurately as short ones. Stop strings are
        found although tokens begin and end within characters. Calls and events in random order keep to the contract.
        The checkpoint has several files, and code in its folder is not run, because it was not allowed."""
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        dtype = "bfloat16" if "bfloat16" in lab.spec.dtypes else "float32"
        with other_model(lab) as other:
            if other is None:
                return measured.record("models tried", 0)
            model = ModelSpec(path=str(other.folder), dtype=dtype)
            engine = other.start(max_running=FEW, seed=11, model=model, max_model_tokens=LONGEST)
            try:
                _check_layout(other, engine, dtype, measured)
                _check_samples(other, engine, other.base, 0, dtype, measured)
                _check_kinds(other, engine, dtype, measured)
                _check_far(other, engine, dtype, measured)
                if Capability.STOP_STRINGS in other.spec.capabilities:
                    _check_cut_strings(other, engine, measured)
                if engine.num_decoded() is not None:
                    requests = [[other.ask("r", other.prompt(6, 243), 2 * FEW + 1, max_tokens=LONG)]]
                    together = other.wait(running_together(engine, requests, LONG))
                    measured.at_most("samples at once", together, FEW_OVERRUN * FEW)
                for version, lay in ((4, whole_shards), (5, lambda state: iter(pieces(state)))):
                    if Capability.SLEEP in other.spec.capabilities:
                        engine.sleep(1)
                        engine.wake()
                    state = other.changed(version)
                    _check_update(engine, lay(state), state, version, dtype, measured)
                    _check_samples(other, engine, state, version, dtype, measured)
                engine.update_weights(whole_shards(other.base), 0)
                Life(other, engine, 5, room=ROOM).run(measured, f"life in {dtype}", FEW_EVENTS)
                other.verify(measured)
            finally:
                engine.close()
            measured.equal("code of the model was run", code_ran(other.folder).exists(), 0)
        return None

    @requirement("model.configuration", since=(2, 0))
    def test_model_configuration(self, lab: RolloutLab, measured: Measured) -> None:
        """A model with sliding windows, and one with scaled rotary positions and logits, give the right log-probs for
        prompts and responses longer than the window and after thousands of tokens, or are refused with a ConfigError at
        the start. Limits, filters and penalties in `generation_config.json` are ignored, because requests contain
        their own; so are dropout and the files' dtype, bfloat16. An engine may decode only one sample concurrently, and
        neither its context length nor its vocabulary need be a multiple of a block size. An untied head may equal the
        embeddings at first: an update makes them differ. Calls and events in random order keep to all of this."""
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        tried = 0
        for name, (families, fields) in CONFIGURED.items():
            known = lab.spec.architectures
            family = next((one for one in families if known is None or one in known), None)
            if family is not None:
                folder = _configured_model(lab.scratch.parent / f"{name.replace(' ', '-')}-model", family, fields)
                other, is_long = RolloutLab(lab.suite, folder, lab.scratch), "max_position_embeddings" in fields
                tried += _tried_model(other, name, measured, slots=8 if is_long else 1, is_long=is_long)
        return measured.record("models tried", tried)

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
        """A mixture of experts whose router has a bias, which a model keeps as a buffer, and one whose experts' weights
        do not add up to 1, are served with the latest weights after every update, whole or in pieces, and after every
        sleep, or refused with a ConfigError at the start."""
        known = lab.spec.architectures
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        tried = 0
        for name, families in ROUTERS.items():
            for family, shape in families.items():
                if known is not None and family not in known:
                    continue
                folder = lab.scratch.parent / f"{family}-model"
                if not folder.exists():
                    write_tiny_model(folder, architecture=family, seed=2, sharpness=2.0, **shape)
                other = RolloutLab(lab.suite, folder, lab.scratch)
                try:
                    is_served = _routes(other, name, measured)
                finally:
                    other.close()
                if is_served:
                    tried += 1
                    break
        return measured.record("models tried", tried)

    @requirement("model.float16", since=(2, 0))
    def test_model_float16(self, lab: RolloutLab, measured: Measured) -> None:
        """A float16 engine has the log-probs of its weights except for rounding, even if hidden states are so large
        that their squares overflow float16; token ids may need more than 16 bits."""
        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        known = lab.spec.architectures
        family = next((name for name in FAMILIES if known is None or name in known), None)
        if "float16" not in lab.spec.dtypes or family is None:
            return measured.record("models tried", 0)
        folder = lab.scratch.parent / "wide-model"
        if not folder.exists():
            write_tiny_model(folder, architecture=family, tied=True, seed=8, layers=1, vocab_size=WIDE)
        other = RolloutLab(lab.suite, folder, lab.scratch)
        try:
            engine = other.start(max_running=4, model=ModelSpec(path=str(folder), dtype="float16"))
            try:
                requests = [other.ask("r", other.prompt(9, 251), 4, max_tokens=16, temperature=1.3)]
                state = {name: tensor.clone() for name, tensor in other.base.items()}
                state["model.layers.0.mlp.down_proj.weight"] *= OUTLIER
                for version, served in enumerate((other.base, state)):
                    if version:
                        engine.update_weights(whole_shards(served), version)
                    plain = other.plain.with_state(_rounded_floats(served, "float16"))
                    off = other.worst(requests, other.run(requests, engine), plain)
                    measured.at_most(f"largest difference of log-probs, version {version}", off, HALF_ROUNDING)
            finally:
                engine.close()
        finally:
            other.close()
        return measured.record("models tried", 1)

    @requirement("initialize.refusals", since=(2, 0))
    def test_initialize_refusals(self, lab: RolloutLab, measured: Measured) -> None:
        """A missing model, a head other than a language model's, an unknown dtype, sizes below 1, an `ep_size` above
        the number of devices, unknown raw arguments, and several workers for an engine with one process are a
        ConfigError, change no mode of torch and leave nothing behind. An engine that was refused, or never
        initialized, can be closed, even twice."""
        absent, dtype = str(lab.folder.parent / "there-is-no-such-model"), max(lab.spec.dtypes, key="bfloat16".__eq__)
        wrong: dict[str, dict[str, Any]] = {
            "a model that is not there": {"model": ModelSpec(path=absent, dtype=dtype)},
            "max_running 0": {"max_running": 0},
            "max_model_tokens 1": {"max_model_tokens": 1},
            "tp_size 0": {"tp_size": 0},
            "pp_size 0": {"pp_size": 0},
            "dp_size 0": {"dp_size": 0},
            "ep_size 0": {"ep_size": 0},
            "ep_size 3 of one device": {"ep_size": 3},
            "an argument that there is not": {"engine_kwargs": {"there_is_no_such_argument": 1}},
            "a value head": {"model": ModelSpec(path=str(lab.folder), head=Head.VALUE)},
        }
        if lab.spec.takes_weights:
            wrong["a dtype that there is not"] = {"model": ModelSpec(path=str(lab.folder), dtype="float31")}
        if lab.spec.max_ranks == 1:
            wrong |= {f"{name} 2 of one process": {name: 2} for name in ("tp_size", "pp_size", "dp_size")}
        accepted, before = [], held(lab.scratch)
        for name, fields in wrong.items():
            engine = lab.suite.registry().load_engine(lab.spec)()
            given: dict[str, Any] = {
                "model": ModelSpec(path=str(lab.folder)),
                "options": lab.options,
                "engine_kwargs": dict(lab.suite.engine_kwargs),
                **fields,
            }
            ctx = RankContext(role="rollout", device=lab.suite.device, scratch_dir=str(lab.scratch), timeout_s=60.0)
            try:
                with kept_modes(f"initialize, refused for {name},", but="threads"):
                    engine.initialize(ctx, RolloutSpec(**given))
                accepted.append(name)
            except ConfigError:
                pass
            except Exception as error:
                accepted.append(f"{name}: {type(error).__name__}: {error}"[:300])
            finally:
                engine.close()
                engine.close()
        untouched = lab.suite.registry().load_engine(lab.spec)()
        untouched.close()
        untouched.close()
        measured.none("no ConfigError", accepted)
        measured.none("left behind by engines that were refused", left_behind(before, lab.scratch))

    @requirement("layout.place", since=(2, 0))
    def test_layout_place(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Layouts name the destination of their weights: this node, a process on it, distinct ranks, and a worker for
        all of them or none; the served dtype; and boxes only of tensors that they list."""
        layouts = changing.layout()
        measured.none("layouts of another node", [layout.node for layout in layouts if layout.node != "localhost"])
        strange = [layout.process for layout in layouts if not _is_process(layout.process)]
        measured.none("processes that are not node:pid", strange)
        devices = {"cpu", lab.suite.device} if lab.suite.device == "cpu" else {"cpu"}
        away = [
            layout.device
            for layout in layouts
            if layout.device not in devices and not layout.device.startswith("cuda:")
        ]
        measured.none("devices that there are not", away)
        measured.equal("ranks with the number of another", len({layout.rank for layout in layouts}), len(layouts))
        dtypes = {meta.dtype for layout in layouts for meta in layout.tensors}
        measured.none("dtypes other than float32", sorted(dtypes - {"float32"}))
        unknown = [name for layout in layouts for name, _ in layout.boxes
                   if name not in {meta.name for meta in layout.tensors}]  # fmt: skip
        measured.none("boxes of tensors that the layout does not name", unknown)
        tied = [name for layout in layouts for name, held in layout.tied.items()
                if held not in lab.base or name in lab.base]  # fmt: skip
        measured.none("tied names that are not", tied)
        workers = [layout.worker for layout in layouts]
        unlike = workers if None in workers and set(workers) != {None} else []
        measured.none("workers of some layouts and not of others", unlike)
        measured.equal("workers of one name", len(workers) - len(set(workers)) if None not in workers else 0, 0)
        measured.none("workers on another node", [layout.worker for layout in layouts if layout.is_apart])

    @requirement("forecast", since=(2, 0))
    def test_forecast(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """The backend's forecast of a replica has the engine's layouts; amounts of memory are None or not negative. (A
        backend without forecasts returns None.)"""
        forecast = lab.suite.registry().load_forecast(lab.spec)
        if forecast is None:
            return measured.record("forecasts", 0)
        ctx = RankContext(role="rollout", device=lab.suite.device, scratch_dir=str(lab.scratch))
        found = forecast([ctx], lab.rollout_spec(), Workload(row_tokens=128, update_rows=0, running_rows=8))
        measured.none("fields that make no sense", senseless(found, 1))
        layouts = changing.layout()
        measured.equal("layouts", len(found.layouts[0]), len(layouts))
        for at, (said, layout) in enumerate(zip(found.layouts[0], layouts, strict=True)):
            measured.none(f"differences from layout {at}", differences(said, layout))
        return None


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
            Life(other, engine, len(name), room=min(room, ROOM)).run(measured, f"life, {name}", FEW_EVENTS)
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


@contextmanager
def other_model(lab: RolloutLab) -> Iterator[RolloutLab | None]:
    """A lab of another model within this context; None: the backend runs none of these families."""
    known = lab.spec.architectures
    family = next((name for name in FAMILIES if known is None or name in known), None)
    if family is None:
        yield None
        return
    folder = lab.scratch.parent / "other-model"
    if not folder.exists():
        write_tiny_model(
            folder, architecture=family, tied=True, seed=6, layers=1, sharpness=1.5, vocab_size=VOCABULARY,
            num_key_value_heads=4, max_position_embeddings=POSITIONS, file_bytes=FILE_BYTES,
        )  # fmt: skip
        write_cut_tokenizer(folder, VOCABULARY)
        add_code(folder)
    other = RolloutLab(lab.suite, folder, lab.scratch)
    try:
        yield other
    finally:
        other.close()


def _rounded(state: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}


def _rounded_floats(state: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights with the values that an engine of this dtype serves, in float32."""
    return {name: tensor.float() for name, tensor in _rounded(state, dtype).items()}


def _check_layout(lab: RolloutLab, engine: RolloutEngine, dtype: str, measured: Measured) -> None:
    layouts = engine.layout()
    held = {meta.name: (meta.shape, meta.dtype) for layout in layouts for meta in layout.tensors}
    expected = {name: (tuple(tensor.shape), dtype) for name, tensor in lab.base.items()}
    wrong = [name for name in sorted(held.keys() | expected.keys()) if held.get(name) != expected.get(name)]
    measured.none("tensors of another name, shape or dtype", wrong)
    tied = dict(item for layout in layouts for item in layout.tied.items())
    measured.equal("other names of the tied tensor", len(tied), 1)
    measured.none("tied to a tensor that is not there", sorted(set(tied.values()) - expected.keys()))


def _check_update(
    engine: RolloutEngine,
    shards: Iterator[WeightShard],
    state: Mapping[str, Tensor],
    version: int,
    dtype: str,
    measured: Measured,
) -> None:
    served = _rounded(state, dtype)
    receipt = engine.update_weights(shards, version)
    wanted = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in served.items()}
    wrong = [n for n in wanted.keys() | receipt.fingerprints.keys() if receipt.fingerprints.get(n) != wanted.get(n)]
    measured.none("fingerprints that differ", sorted(wrong))
    measured.equal("version", receipt.version, version)
    measured.equal("tensors", receipt.num_tensors, len(served))
    measured.equal("bytes", receipt.num_bytes, sum(t.numel() * t.element_size() for t in served.values()))


def _check_samples(
    lab: RolloutLab,
    engine: RolloutEngine,
    state: Mapping[str, Tensor],
    version: int,
    dtype: str,
    measured: Measured,
) -> None:
    """Checks that samples of a model in another dtype are the same except for rounding."""
    requests = [
        lab.ask("drawn", lab.prompt(9, 242), 8, max_tokens=24, temperature=1.3),
        lab.ask("hot", lab.prompt(5, 244), 8, max_tokens=24, temperature=2.0),
        lab.ask("long", lab.prompt(70, 242), 2, max_tokens=60),
    ]
    outputs = lab.run(requests, engine)
    measured.none("wrong samples", wrong_identities(requests, outputs))
    versions = {run.version for output in outputs for run in output.versions}
    measured.none(f"versions other than {version}", sorted(versions - {version}))
    outside = [token for output in outputs for token in output.token_ids.tolist() if not 0 <= token < lab.vocabulary]
    measured.none("tokens outside the vocabulary", outside)
    plain = lab.plain.with_state(_rounded_floats(state, dtype))
    off, found = _differences(lab, outputs, samples_with_logits(lab, requests, outputs, plain))
    measured.at_most("mean difference of log-probs", float(off.mean()), MEAN_ROUNDING)
    measured.at_most("largest difference of log-probs", float(off.max()), WORST_ROUNDING)
    if dtype == "bfloat16":
        rounded = (found.bfloat16().float() == found).float().mean()
        measured.at_most("share of log-probs that are bfloat16 numbers", float(rounded), 0.3)
    else:
        measured.at_most("largest difference of log-probs", float(off.max()), lab.suite.tolerance)


def _check_kinds(lab: RolloutLab, engine: RolloutEngine, dtype: str, measured: Measured) -> None:
    """Checks that the number of distinct first tokens of one prompt follows from the model's probabilities."""
    request = lab.ask("kinds", lab.prompt(9, 247), NUM_KINDS, max_tokens=1, seed=3)
    plain = lab.plain.with_state(_rounded_floats(lab.base, dtype))
    came = 1 - (1 - plain.next_logits(request.prompt_ids).softmax(-1)) ** NUM_KINDS
    drawn = {int(output.token_ids[0]) for output in lab.run([request], engine)}
    # Occurrences of tokens are negatively correlated: the deviation of independent ones is an upper bound.
    off = (len(drawn) - float(came.sum())) / float((came * (1 - came)).sum().sqrt())
    measured.record("different first tokens", len(drawn))
    measured.at_most("deviations of their number from what is expected", abs(off), FEWER)


def _check_cut_strings(lab: RolloutLab, engine: RolloutEngine, measured: Measured) -> None:
    """Checks that responses end with the token that completes a stop string, of whose characters each token may have a
    part: also one that begins in given tokens."""
    tokenizer = load_tokenizer(str(lab.folder))
    begin = int(tokenizer.convert_tokens_to_ids("Ã"))  # the first byte of an é
    requests = [
        lab.ask(f"{at}", lab.prompt(6, 254), 8, max_tokens=80, temperature=1.5, seed=at, stop_strings=strings)
        for at, strings in enumerate((("é",), ("√",), ("é√",), ("a ", "√√"), (" é", "√a ", "never")))
    ]
    requests.append(replace(requests[0], request_id="begun", response_ids=(begin,)))
    samples = samples_with_logits(lab, requests, lab.run(requests, engine))
    faults = [fault for sample in samples if (fault := wrong_end(lab, sample, aborted=False, room=LONGEST))]
    measured.none("samples that end wrongly where tokens are parts of characters", faults)
    stopped = sum(sample.output.finish_reason is FinishReason.STOP for sample in samples)
    measured.at_least("samples that such a string stopped", stopped, 1)


def _check_far(lab: RolloutLab, engine: RolloutEngine, dtype: str, measured: Measured) -> None:
    """Checks that log-probs after a thousand tokens are as close to the model's as after a few, at the same
    temperature."""
    near = lab.ask("near", lab.prompt(NEAR, 248), 6, max_tokens=30)
    far = lab.ask("far", lab.prompt(FAR[0], 248), 2, max_tokens=30)
    outputs = lab.run([near, far], engine)
    plain = lab.plain.with_state(_rounded_floats(lab.base, dtype))
    samples = samples_with_logits(lab, [near, far], outputs, plain)
    off = {}
    for request in (near, far):
        own = [sample for sample in samples if sample.request is request]
        off[request.request_id] = float(_differences(lab, [sample.output for sample in own], own)[0].mean())
    measured.record(f"mean difference of log-probs behind {NEAR} tokens", off["near"])
    limit = max(FARTHER * off["near"], lab.suite.tolerance)
    measured.at_most(f"mean difference behind {FAR[0]} tokens", off["far"], limit)


def _differences(
    lab: RolloutLab, outputs: Sequence[GenerationOutput], samples: Sequence[object]
) -> tuple[Tensor, Tensor]:
    """Differences of log-probs from the plain model's, and the log-probs."""
    from rlsdk.testing.rollout_audit import Sample
    from rlsdk.testing.rollout_plain import contract_log_probs

    off, found = [], []
    for sample in samples:
        assert isinstance(sample, Sample)
        logs = contract_log_probs(sample.logits, sample.sampling, lab.kind)
        mine = torch.as_tensor(sample.output.log_probs)
        found.append(mine)
        off.append((mine.double() - logs[range(len(mine)), sample.tokens]).abs())
    assert len(samples) == len(outputs), "samples without a log-prob for each token"
    return torch.cat(off), torch.cat(found)


def _is_process(text: str) -> bool:
    node, _, pid = text.rpartition(":")
    return bool(node) and pid.isdigit()
