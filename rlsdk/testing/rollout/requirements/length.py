"""Requirements: prompts and responses of every length, up to the model's context length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlsdk.interfaces import Capability, FinishReason, GenerationRequest, RolloutEngine
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.audit import audit
from rlsdk.testing.rollout.draw_statistics import DrawStatistics, Noise, Z
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.suites.requirements import Measured, requirement

BLOCKS = (16, 32, 64, 100, 128, 192, 256, 300, 384, 448)
"""Lengths that may be borders in an engine: pages of the KV cache, tiles of a kernel, chunks of a prompt."""
POSITIONS = (8, 128, 256)
"""Positions between which draws are tested separately."""
LONGEST_STRING = 12
"""Characters of a stop string that occurs only once in a response are fewer."""
FAR_MORE = (("far more", 1_000_000_000), ("16 bits", 2**16), ("31 bits", 2**31 - 1))
"""Limits that would not fit in any memory."""


class LengthRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("length.prompts", since=(2, 0))
    def test_length_prompts(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Prompts of every length are read completely and independently of their neighbours: one token, lengths around
        block borders, and the full context length."""
        requests = [
            lab.ask(f"p{length}", lab.prompt(length, 140), 1 + at % 2, max_tokens=3, seed=length)
            for at, length in enumerate(sorted(lengths(lab)))
        ]
        longest = lab.prompt(max(lengths(lab)), 140)
        # Prompts that share a beginning: a cached prefix must be the same text.
        requests += [
            lab.ask(f"shared{length}", (*longest[:length], *lab.prompt(9, 141)), max_tokens=3)
            for length in BLOCKS
            if length + 12 < lab.suite.max_model_tokens
        ]
        measured.record("longest prompt", len(longest))
        faults, _ = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        shuffled = requests[1::2] + requests[::2]
        measured.none("wrong samples in another order", audit(lab, shuffled, lab.run(shuffled))[0])

    @requirement("length.responses", since=(2, 0))
    def test_length_responses(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Responses of hundreds of tokens have the right log-probs and draws to their end, whatever ends next to them,
        and their draws are independent; filters, temperatures and stops work to their end too."""
        room = lab.suite.max_model_tokens
        long = [
            lab.ask("whole room", lab.prompt(1, 142), 4, max_tokens=room),
            lab.ask("long", lab.prompt(9, 143), 4, max_tokens=room * 3 // 4, seed=8),
            lab.ask("behind a long prompt", lab.prompt(room // 2, 144), 3, max_tokens=room // 2, seed=9),
        ]
        short = [
            lab.ask(f"short{at}", lab.prompt(4 + 20 * at, 145), 2, max_tokens=5 + 17 * at, seed=at, temperature=0.7)
            for at in range(6)
        ]
        requests = [short[0], long[0], *short[1:4], *long[1:], *of_every_kind(lab), *short[4:]]
        faults, samples = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        hundreds = [sample for sample in samples if sample.request in long]
        drawn = DrawStatistics.of(hundreds, lab.eos)
        borders = [border for border in POSITIONS if border < room // 2]
        for low, high in zip(borders, (*borders[1:], room), strict=True):
            z = drawn.by_name["surprise"].of((drawn.position >= low) & (drawn.position < high)).z()
            measured.at_most(f"deviations of log-probability from token {low} on", abs(z), Z)
        measured.none("draws that follow something else", drawn.faults(borders))
        for request in long:
            own = [sample for sample in hundreds if sample.request is request]
            measured.none("draws that depend on others", Noise.of(own).faults())

    @requirement("length.stop_strings", needs=Capability.STOP_STRINGS, since=(2, 0))
    def test_length_stop_strings(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A stop string is found however many tokens of the response precede it."""
        decode = load_tokenizer(str(lab.folder)).decode
        whole = lab.ask("r", lab.prompt(6, 148), max_tokens=lab.suite.max_model_tokens * 3 // 4, temperature=1.2)
        (tokens,) = tokens_of(lab.run([whole])).values()
        requests = []
        for at in [border + 1 for border in BLOCKS if border + 1 < len(tokens)]:
            text = decode(tokens[:at])
            strings = [text[-size:] for size in range(2, LONGEST_STRING) if text[-size:] not in text[:-1]]
            if strings and text.startswith(decode(tokens[: at - 1])):
                sampling = replace(whole.sampling, stop_strings=(strings[0],))
                requests.append(replace(whole, request_id=f"after {at}", sampling=sampling))
        outputs = lab.run(requests)
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        stopped = sum(output.finish_reason is FinishReason.STOP for output in outputs)
        measured.at_least("samples that such a string stopped", stopped, int(Capability.SEED in lab.spec.capabilities))

    @requirement("length.limits", since=(2, 0))
    def test_length_limits(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Limits are exact to the token: of 1 and 2 tokens, of the remaining room, and of far more than the room."""
        room = lab.suite.max_model_tokens
        requests = list(limits(lab, room))
        faults, _ = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        alone = [request for request in requests if request.request_id.startswith("alone")]
        for request in alone:
            measured.none(
                f"wrong samples of one call, {request.request_id}", audit(lab, [request], lab.run([request]))[0]
            )

    @requirement("length.continued", since=(2, 0))
    def test_length_continued(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A response continues after hundreds of tokens with the right log-probs and, if seeded, the same tokens."""
        room = lab.suite.max_model_tokens
        whole = lab.ask("r", lab.prompt(6, 146), 2, max_tokens=room * 3 // 4, temperature=1.2, seed=21)
        tokens = tokens_of(lab.run([whole]))
        cuts = [cut for cut in (1, 31, 128, 130, 257, 300, room * 3 // 4 - 1) if cut < room * 3 // 4]
        requests = [
            replace(whole, request_id=f"{cut}", n=1, first_sample=1, response_ids=tuple(tokens["r", 1][:cut]))
            for cut in cuts
        ]
        outputs = lab.run(requests)
        measured.none("wrong samples", audit(lab, requests, outputs)[0])
        if Capability.SEED in lab.spec.capabilities:
            changed = [
                f"behind {cut} tokens"
                for (cut, _), new in tokens_of(outputs).items()
                if new != tokens["r", 1][int(cut) :]
            ]
            measured.none("samples that an interruption changed", changed)


def of_every_kind(lab: RolloutLab) -> Iterator[GenerationRequest]:
    """Long responses: filtered, greedy, stopped, at high and low temperature, and one after a long prompt."""
    room = lab.suite.max_model_tokens
    for at, (name, sampling) in enumerate(every_setting(lab).items()):
        yield lab.ask(name, lab.prompt(5 + at, 139), 2, max_tokens=room * 3 // 8 - 9 * at, seed=at, **sampling)
    for eighths in (5, 6, 7):
        yield lab.ask(f"behind {eighths} / 8", lab.prompt(room * eighths // 8, 139), max_tokens=room, seed=eighths)


def every_setting(lab: RolloutLab) -> dict[str, dict[str, object]]:
    """Sampling parameters of every kind that permit long responses."""
    rare = int(lab.plain.next_logits(lab.prompt(5, 139)).argmin())
    kinds: dict[str, dict[str, object]] = {
        "filtered": {"top_k": 6, "top_p": 0.8, "temperature": 1.3},
        "greedy": {"temperature": 0.0},
        "cold": {"temperature": 0.4},
        "hot": {"temperature": 2.0, "top_p": 0.9},
        "stops": {"stop_token_ids": (rare,), "temperature": 1.2},
    }
    if Capability.MIN_P in lab.spec.capabilities:
        kinds["min-p"] = {"min_p": 0.15, "temperature": 1.4}
    return kinds


def lengths(lab: RolloutLab) -> set[int]:
    """Of prompts."""
    room = lab.suite.max_model_tokens
    about = {border + off for border in BLOCKS for off in (-1, 0, 1)}
    return {length for length in {1, 2, 3, 7, *about, room - 3, room - 2, room - 1} if 0 < length < room}


def limits(lab: RolloutLab, room: int) -> Iterator[GenerationRequest]:
    """Requests that end at a limit."""
    for left in (1, 2, 3):
        for asked in (1, 2, 3, 50):
            yield lab.ask(f"{left} left, {asked}", lab.prompt(room - left, 147 + asked), 2, max_tokens=asked)
    for asked in (1, 2, 15, 16, 17):
        yield lab.ask(f"alone, {asked}", lab.prompt(5, 148), 3, max_tokens=asked)
    prompt = lab.prompt(room - 20, 149)
    for name, asked in (("alone, all", 20), ("one less", 19), ("one more", 21), *FAR_MORE):
        yield lab.ask(name, prompt, 2, max_tokens=asked)
    given = lab.prompt(17, 150)
    for name, asked in (("alone, continued to the room", 50), ("continued by one", 18)):
        yield replace(lab.ask(name, prompt, 2, max_tokens=asked), response_ids=given)
