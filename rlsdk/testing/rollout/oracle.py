"""Invariants of all answers of a rollout engine, for any requests and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlsdk.interfaces import Capability, FinishReason, GenerationOutput, GenerationRequest
from rlsdk.testing.rollout.audit import Sample, Subject, adds_up, faults_of, samples_with_logits, unreadable
from rlsdk.testing.rollout.recorder import Call, Record, RecordingRolloutEngine, Weights

if TYPE_CHECKING:
    from rlsdk.testing.rollout.plain_model import PlainModel

MOST_SAMPLES = 120
"""Largest number of samples per requirement that are compared with the plain model."""
MOST_BY_ROUNDING = 1
"""Number of seeds per requirement whose samples may differ from earlier ones: if two tokens are equally probable except
for rounding, the rest of the batch may decide, and decides the same whenever the same batch comes again."""


@dataclass(eq=False)
class Oracle:
    """Remembers the samples of seeds over a whole suite."""

    lab: Subject
    drawn: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)
    """Everything that a seeded sample depends on -> its longest response so far."""
    models: list[tuple[Weights, PlainModel]] = field(default_factory=list)

    def faults(self, record: Record, room: int) -> list[str]:
        """Faults in the answers of an engine with room for `room` tokens, since the last call."""
        calls = record.take_calls()
        faults = [fault for call in calls for fault in _wrong_form(self.lab, call)]
        if faults:
            return faults
        pairs = [(call, given.output) for call in calls for given in call.given if len(given.output.token_ids)]
        faults += [fault for call, output in pairs for fault in [_wrong_versions(call, output)] if fault]
        if not faults:
            faults += self._wrong_samples(_some(pairs), room)
        changed = self._changed(pairs) if Capability.SEED in self.lab.spec.capabilities else []
        if len(changed) > MOST_BY_ROUNDING:
            faults += changed
        return faults

    def _wrong_samples(self, pairs: Sequence[tuple[Call, GenerationOutput]], room: int) -> list[str]:
        faults = []
        for call, request, sample in self._samples(pairs):
            faults += faults_of(self.lab, sample, aborted=request.request_id in call.aborted, room=room)
        return faults

    def _samples(
        self, pairs: Sequence[tuple[Call, GenerationOutput]]
    ) -> Iterator[tuple[Call, GenerationRequest, Sample]]:
        """Outputs with the logits of the weights that sampled them, without those of unknown weights."""
        groups: dict[tuple[Weights, ...], list[tuple[Call, GenerationRequest, GenerationOutput]]] = {}
        for call, output in pairs:
            found = [_weights_of(call, run.version) for run in output.versions]
            weights = tuple(one for one in found if one is not None and one.state is not None)
            if len(weights) == len(found):
                groups.setdefault(weights, []).append((call, _request_of(call, output), output))
        for weights, group in groups.items():
            parts = [
                # One request each, named by its index, because calls may reuse ids.
                samples_with_logits(
                    self.lab,
                    [replace(request, request_id=str(at)) for at, (_, request, _) in enumerate(group)],
                    [replace(output, request_id=str(at)) for at, (_, _, output) in enumerate(group)],
                    self._model(one),
                )
                for one in weights
            ]
            by_name = [{sample.request.request_id: sample for sample in part} for part in parts]
            for at, (call, request, output) in enumerate(group):
                logits = _by_runs(output, [part[str(at)].logits for part in by_name])
                yield call, request, Sample(request, output, logits)

    def _model(self, weights: Weights) -> PlainModel:
        assert weights.state is not None
        if weights.state is self.lab.base:
            return self.lab.plain
        for known, model in self.models:
            if known.state is weights.state:
                return model
        self.models = [*self.models[-2:], (weights, self.lab.plain.with_state(weights.state))]
        return self.models[-1][1]

    def _changed(self, pairs: Sequence[tuple[Call, GenerationOutput]]) -> list[str]:
        """Seeds whose samples depend on the same things as earlier ones, but neither is a prefix of the other."""
        faults: dict[tuple[Any, ...], str] = {}
        for call, output in pairs:
            request = _request_of(call, output)
            sampling, given = request.sampling, request.response_ids
            if sampling.seed is None or sampling.temperature == 0:
                continue
            weights = call.served[0]
            if weights.state is None or any(one.state is not weights.state for one in call.served):
                continue
            key = (
                weights.identity(), request.prompt_ids, sampling.seed, output.sample_index,
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            )  # fmt: skip
            known = self.drawn.get(key, ())
            if known[: len(given)] != given:
                continue  # it continues after tokens that did not come from the seed
            text = (*given, *output.token_ids.tolist())
            shared = min(len(known), len(text))
            if known[:shared] == text[:shared]:
                self.drawn[key] = max(known, text, key=len)
            else:
                faults[key] = f"sample {request.request_id!r}/{output.sample_index}: its seed gave other tokens before"
        return list(faults.values())


def wrong_counts(engine: RecordingRolloutEngine) -> list[str]:
    """Impossible values that an open engine reports of itself."""
    if engine.is_closed:
        return []
    decoded, used, given = engine.num_decoded(), engine.kv_used(), engine.record.num_given
    if type(decoded) not in (int, type(None)) or type(used) not in (int, float, type(None)):
        return [f"num_decoded is {type(decoded).__name__}, kv_used is {type(used).__name__}, expected int and float"]
    faults = [] if decoded is None or decoded >= given else [f"num_decoded is {decoded}, {given} tokens were given out"]
    return faults + ([] if used is None or 0 <= used <= 1 else [f"kv_used is {used}, expected 0 to 1"])


def _wrong_form(lab: Subject, call: Call) -> list[str]:
    """Faults in the set of samples of a call, and in their form."""
    names = [request.request_id for request in call.requests]
    wanted = {
        (request.request_id, index)
        for request in call.requests
        for index in range(request.first_sample, request.first_sample + request.n)
    }
    came = Counter((given.output.request_id, given.output.sample_index) for given in call.given)
    faults = [f"{key} was not asked for" for key in came if key not in wanted]
    if len(set(names)) == len(names):
        faults += [f"{key} came {times} times" for key, times in came.items() if times > 1]
        faults += [f"{key} is missing" for key in wanted if key not in came] if call.has_ended else []
    for given in call.given:
        faults += [fault for fault in [unreadable(lab, given.output)] if fault]
        said = f"sample {given.output.request_id!r}/{given.output.sample_index}"
        faults += [f"{said} changed after it was given out"] if given.is_changed else []
        reason, is_named = given.output.finish_reason, given.output.request_id in call.aborted
        if not len(given.output.token_ids) and reason is not FinishReason.ABORT:
            faults.append(f"{said} has no token, finish reason {reason}")
        if reason is FinishReason.ABORT and not is_named:
            faults.append(f"{said} was aborted, and nobody asked for that")
    return faults


def _wrong_versions(call: Call, output: GenerationOutput) -> str:
    """Describes runs that do not add up, or that name weights that were not served, in this order, during the call;
    empty: none."""
    said = f"sample {output.request_id!r}/{output.sample_index}: versions {[run.version for run in output.versions]}"
    if not adds_up(output):
        return f"{said} do not add up to {len(output.token_ids)} tokens"
    named = {request.request_id: request.adapter_version for request in call.requests}.get(output.request_id)
    if named is not None:
        other = any(run.version != named for run in output.versions)
        return f"{said}, the request names {named}" if other else ""
    served = iter([weights.version for weights in call.served])
    if all(any(run.version == version for version in served) for run in output.versions):
        return ""
    return f"{said}, served were {[weights.version for weights in call.served]}"


def _weights_of(call: Call, version: int) -> Weights | None:
    """The weights of this version; None: several weights had this version, it came before the call (a request may name
    it), or an old KV cache was kept."""
    found = [weights for weights in call.served if weights.version == version]
    alike = all(weights.state is found[0].state for weights in found)
    return None if not found or not alike or (call.is_stale and len(call.served) > 1) else found[0]


def _request_of(call: Call, output: GenerationOutput) -> GenerationRequest:
    return next(request for request in call.requests if request.request_id == output.request_id)


def _by_runs(output: GenerationOutput, logits: Sequence[Tensor]) -> Tensor:
    """`[L, V]`: for each run, the rows of its own weights' logits."""
    parts, start = [], 0
    for run, of_all in zip(output.versions, logits, strict=True):
        parts.append(of_all[start : start + run.num_tokens])
        start += run.num_tokens
    return torch.cat(parts)


def _some(pairs: Sequence[tuple[Call, GenerationOutput]]) -> list[tuple[Call, GenerationOutput]]:
    """At most `MOST_SAMPLES`, spread over the requirement; samples of several weights come first."""
    mixed = [pair for pair in pairs if len(pair[1].versions) > 1][:MOST_SAMPLES]
    whole = [pair for pair in pairs if len(pair[1].versions) == 1]
    most = max(MOST_SAMPLES - len(mixed), 1)
    return mixed + [whole[at * len(whole) // most] for at in range(most)] if len(whole) > most else mixed + whole
