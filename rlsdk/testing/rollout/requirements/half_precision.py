"""Requirements: models in bfloat16 and float16. The first is of another family, with tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    FinishReason,
    GenerationOutput,
    ModelSpec,
    RolloutEngine,
    WeightShard,
    fingerprint,
)
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.process.models import add_code, code_ran, write_cut_tokenizer, write_tiny_model
from rlsdk.testing.rollout.audit import Sample, samples_with_logits, wrong_end
from rlsdk.testing.rollout.lab import RolloutLab, pieces, whole_shards
from rlsdk.testing.rollout.outputs import wrong_identities
from rlsdk.testing.rollout.plain_model import contract_log_probs
from rlsdk.testing.rollout.random_events import FEW_EVENTS, Life
from rlsdk.testing.rollout.requirements.capacity import running_together
from rlsdk.testing.rollout.requirements.configured_models import FAMILIES, FAR, LONGEST, POSITIONS, ROOM
from rlsdk.testing.suites.requirements import NOT_CLAIMED, Measured, requirement

FILE_BYTES = 100_000
"""File size of a checkpoint with several files."""
NUM_CUT, HOT, TOP_P, CUT_SLACK = 96, 2.0, 0.9, 0.02
"""Number of draws from a nucleus of a wide vocabulary, their temperature and limit, and what rounding may add to it."""
NEAR = 10
"""Length of the short prompt, with whose log-probs those of long prompts are compared."""
FARTHER = 4.0
"""Factor by which rounding may grow after that many tokens; in transformers it grows by half."""
VOCABULARY = 1031
"""A prime vocabulary size: an engine that pads it must not draw padding. It is so large that a cumulative sum of
probabilities in half precision skips most tokens."""
WIDE_BITS = 17
WIDE = 1 << WIDE_BITS
"""A vocabulary of which half of the token ids need more than 16 bits."""
NUM_FLAT, BIT_Z = 256, 5.0
"""Number of draws of which all tokens are equally probable, and largest deviation of the number of ones in a bit of
their ids, in standard deviations: with random numbers of 16 bits, each inverse of a sum is an even id."""
NUM_KINDS, FEWER = 1000, 6.0
"""Number of first tokens among which distinct ones are counted, and the allowed deviation of that count in standard
deviations: less than one false alarm in a million."""
FEW = 3
"""`max_running` of that engine: so small that one more sample is a third more."""
LONG, FEW_OVERRUN = 120, 1.3
"""Tokens of the samples that measure this, and allowed factor of concurrent samples over `max_running`: tokens that an
engine decodes ahead of its caller are few compared with such responses."""
HALF_ROUNDING = 0.05
"""Largest difference of log-probs of a float16 model with one layer."""
OUTLIER = 1000.0
"""Factor of hidden states, which are then as large as in some channels of language models: squares overflow float16."""
MEAN_ROUNDING, WORST_ROUNDING = 0.06, 0.8
"""Mean and largest difference of log-probs of a bfloat16 model from float32 with the same weights."""


class HalfPrecisionRequirements:
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
                Life(other, engine, 5, room=ROOM).run(measured, f"random calls in {dtype}", FEW_EVENTS)
                other.verify(measured)
            finally:
                engine.close()
            measured.equal("code of the model was run", code_ran(other.folder).exists(), 0)
        return None

    @requirement("model.float16", since=(2, 0))
    def test_model_float16(self, lab: RolloutLab, measured: Measured) -> None:
        """A float16 engine has the log-probs of its weights except for rounding, even if hidden states are so large
        that their squares overflow float16. Token ids may need more than 16 bits; if all tokens of so large a
        vocabulary are equally probable, each is drawn as often; top-p finds its limit among so many small ones."""
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
            engine = other.start(model=ModelSpec(path=str(folder), dtype="float16"))
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
                engine.update_weights(whole_shards(other.base), 2)
                request = other.ask("cut", other.prompt(9, 253), NUM_CUT, max_tokens=1, temperature=HOT, top_p=TOP_P)
                kept = [int(output.token_ids[0]) for output in other.run([request], engine)]
                plain = other.plain.with_state(_rounded_floats(other.base, "float16"))
                ordered, order = (plain.next_logits(request.prompt_ids) / HOT).softmax(-1).sort(descending=True)
                before = torch.zeros_like(ordered).scatter(0, order, ordered.cumsum(0) - ordered)[kept]
                measured.at_most(
                    f"mass before a token that top-p {TOP_P} keeps", float(before.max()), TOP_P + CUT_SLACK
                )
                # The last norm scales all logits.
                flat = {name: t * (t.ndim > 1 or ".layers." in name) for name, t in other.base.items()}
                engine.update_weights(whole_shards(flat), 3)
                request = other.ask("flat", other.prompt(9, 252), NUM_FLAT, max_tokens=1)
                tokens = torch.tensor([int(output.token_ids[0]) for output in other.run([request], engine)])
                ones = ((tokens[:, None] >> torch.arange(WIDE_BITS)) & 1).sum(0)
                off = float((ones - NUM_FLAT / 2).abs().max()) / (NUM_FLAT / 4) ** 0.5
                measured.at_most("deviations of the ones in a bit of equally probable ids", off, BIT_Z)
            finally:
                engine.close()
        finally:
            other.close()
        return measured.record("models tried", 1)


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
    lab: RolloutLab, outputs: Sequence[GenerationOutput], samples: Sequence[Sample]
) -> tuple[Tensor, Tensor]:
    """Differences of log-probs from the plain model's, and the log-probs."""
    off, found = [], []
    for sample in samples:
        logs = contract_log_probs(sample.logits, sample.sampling, lab.kind)
        mine = torch.as_tensor(sample.output.log_probs)
        found.append(mine)
        off.append((mine.double() - logs[range(len(mine)), sample.tokens]).abs())
    assert len(samples) == len(outputs), "samples without a log-prob for each token"
    return torch.cat(off), torch.cat(found)
