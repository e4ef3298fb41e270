"""Requests of every kind, for calls with many requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlsdk.interfaces import Capability, GenerationRequest
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.outputs import tokens_of

LETTERS = 12
"""One-letter stop strings: some response ends with one."""
PREFIXES = (1, 15, 16, 17, 32, 48, 63, 64, 65, 128, 129)
"""Lengths of prefixes that random prompts share: near the block boundaries of a prefix cache."""
GIVEN = (0, 0, 0, 1, 2, 3, 8, 15, 16, 31)
"""Numbers of tokens that random responses already have."""
NAMES = ("r{}", "r{}", "r{}", "{}", "-{} / \u00fc\u2713", "r" * 200 + "{}")
"""Forms of the ids of random requests."""


def kinds(lab: RolloutLab) -> Iterator[GenerationRequest]:
    """A request of every kind."""
    capabilities, letters = lab.spec.capabilities, stop_letters(lab)
    half = tuple(range(lab.vocabulary // 2, lab.vocabulary))
    mixed: dict[str, tuple[int, int, Mapping[str, object]]] = {
        "plain": (5, 6, {}),
        "hot": (8, 6, {"temperature": 2.0, "max_tokens": 25}),
        "cold": (8, 6, {"temperature": 0.2}),
        "top-k": (3, 6, {"top_k": 3, "max_tokens": 19}),
        "top-p": (12, 6, {"top_p": 0.5, "temperature": 1.2}),
        "both": (5, 6, {"top_k": 9, "top_p": 0.8, "temperature": 0.8}),
        "greedy": (7, 3, {"temperature": 0.0, "max_tokens": 21}),
        "greedy with filters": (7, 2, {"temperature": 0.0, "top_k": 5, "top_p": 0.5}),
        "one token": (4, 9, {"max_tokens": 1}),
        "one greedy token": (4, 2, {"max_tokens": 1, "temperature": 0.0}),
        "two tokens": (40, 3, {"max_tokens": 2}),
        "one token of prompt": (1, 4, {"max_tokens": 33}),
        "long prompt": (lab.suite.max_model_tokens // 2, 2, {"max_tokens": 6}),
        "to the room": (lab.suite.max_model_tokens - 6, 2, {"max_tokens": 50}),
        "stops": (6, 8, {"stop_token_ids": half, "max_tokens": 12}),
        "greedy stops": (6, 2, {"stop_token_ids": half, "temperature": 0.0, "max_tokens": 40}),
        "seed 0": (6, 3, {"seed": 0}),
        "no seed": (6, 3, {"seed": None}),
        "large n": (6, 64, {"max_tokens": 4}),
    }
    if Capability.MIN_P in capabilities:
        mixed["min-p"] = (6, 6, {"min_p": 0.2, "temperature": 1.5})
    if Capability.STOP_STRINGS in capabilities:
        mixed["stop strings"] = (6, 8, {"stop_strings": letters, "max_tokens": 14})
        mixed["stops of both kinds"] = (6, 8, {"stop_strings": letters[:3], "stop_token_ids": half[::5]})
        mixed["stop string, one token"] = (6, 6, {"stop_strings": letters, "max_tokens": 1})
        mixed["greedy stop strings"] = (6, 2, {"stop_strings": letters, "temperature": 0.0, "max_tokens": 40})
    for at, (name, (length, n, sampling)) in enumerate(mixed.items()):
        yield lab.ask(name, lab.prompt(length, 153), n, **{"max_tokens": 10, "seed": 60 + at, **sampling})
    yield replace(lab.ask("first 5", lab.prompt(5, 153), 3, max_tokens=17, seed=90), first_sample=5)
    given = lab.prompt(11, 154)
    yield replace(lab.ask("continued", lab.prompt(5, 153), 3, max_tokens=17, seed=91), response_ids=given)
    for at in range(2):
        yield lab.ask(f"twin {at}", lab.prompt(5, 153), 2, max_tokens=12, seed=92 + at)


def at_random(lab: RolloutLab, seed: int, count: int, room: int | None = None) -> Iterator[GenerationRequest]:
    """Requests of random lengths and settings.

    Args:
        lab: the engine's lab.
        seed: chooses the requests.
        count: number of requests.
        room: the engine's `max_model_tokens`; None: the suite's.
    """
    source, capabilities = random.Random(seed), lab.spec.capabilities
    room = room or lab.suite.max_model_tokens
    for at in range(count):
        sampling: dict[str, object] = {
            "max_tokens": source.choice((1, 2, 5, 9, 16, 40)),
            "temperature": source.choice((0.0, 0.3, 0.8, 1.0, 1.0, 1.6, 2.0)),
            "top_k": source.choice((0, 0, 0, 1, 4, 30, lab.vocabulary - 1, 2 * lab.vocabulary)),
            "top_p": source.choice((1.0, 1.0, 1.0, 0.3, 0.8, 0.95)),
            "seed": source.choice((None, 0, -1, seed, source.getrandbits(62), source.choice((-(2**63), 2**64 - 1)))),
            "stop_token_ids": source.choice(((), (), (lab.eos,), tuple(range(60, 75)))),
        }
        if Capability.MIN_P in capabilities:
            sampling["min_p"] = source.choice((0.0, 0.0, 0.05, 0.4))
        if Capability.STOP_STRINGS in capabilities:
            sampling["stop_strings"] = source.choice(((), (), stop_letters(lab)[:3]))
        prompt = _prompt_at_random(lab, source, 1000 + 50 * seed + at, room - 4)
        name = source.choice(NAMES).format(at)
        request = lab.ask(name, prompt, source.choice((1, 1, 2, 5)), **sampling)
        if source.random() < 0.3:
            request = replace(request, first_sample=source.choice((1, 3, 1000)))
        given = lab.prompt(source.choice(GIVEN), 77 + source.randrange(3))
        is_free = not sampling.get("stop_strings") and not set(given) & set(request.sampling.stop_token_ids)
        if is_free and len(given) < min(request.sampling.max_tokens, room - len(prompt)):
            request = replace(request, response_ids=given)
        yield request


def _prompt_at_random(lab: RolloutLab, source: random.Random, salt: int, longest: int) -> tuple[int, ...]:
    """A prompt that may share a prefix with others, contain special tokens, or repeat one token."""
    prompt = lab.prompt(source.choice((1, 2, 5, 17, 33, 70, longest)), salt)
    if source.random() < 0.4:
        prefix = lab.prompt(longest, 76 + source.randrange(2))[: source.choice(PREFIXES)]
        prompt = (*prefix, *prompt)[:longest]
    if source.random() < 0.1:
        prompt = prompt[:1] * len(prompt)
    if source.random() < 0.2:
        at = source.randrange(len(prompt))
        prompt = (*prompt[:at], lab.eos, *prompt[at + 1 :])
    return prompt


def stopping(lab: RolloutLab, salt: int) -> Iterator[GenerationRequest]:
    """Requests that end by their own stop tokens; the first ends immediately."""
    prompt = lab.prompt(8, 160 + salt)
    first = int(lab.plain.next_logits(prompt).argmax())
    every = tuple(range(lab.vocabulary))
    yield lab.ask("at once", prompt, 2, temperature=0.0, stop_token_ids=(first,))
    yield lab.ask("any", prompt, 4, stop_token_ids=every, seed=salt)
    yield lab.ask("none", prompt, 4, max_tokens=12, seed=salt)
    yield lab.ask("those of the prompt", prompt, 6, stop_token_ids=prompt, max_tokens=24, seed=salt + 1)
    yield lab.ask("even", prompt, 6, stop_token_ids=every[::2], max_tokens=3, seed=salt + 2)
    yield lab.ask("odd", prompt, 6, stop_token_ids=every[1::2], max_tokens=2, seed=salt + 2)
    yield lab.ask("the last one", prompt, 6, stop_token_ids=(every[-1], 0), max_tokens=30, temperature=2.0, seed=salt)
    yield lab.ask("one token", prompt, 6, stop_token_ids=every[::3], max_tokens=1, seed=salt + 3)
    yield replace(
        lab.ask("continued", prompt, 4, stop_token_ids=every[::4], max_tokens=9, seed=salt + 4),
        response_ids=(1, 3, 5),
    )


def stopping_by_text(lab: RolloutLab) -> Iterator[GenerationRequest]:
    """Greedy requests that end at a string in their response: of one token, of several, across the given tokens."""
    decode = load_tokenizer(str(lab.folder)).decode
    for salt in range(4):
        prompt = lab.prompt(7, 170 + salt)
        whole = tokens_of(lab.run([lab.ask("r", prompt, max_tokens=90, temperature=0.0)]))["r", 0]
        text = decode(whole)
        # Short strings and strings of many tokens; a single one, one after others, one with the prefix of another.
        for at, length in ((1, 1), (4, 2), (9, 3), (0, 5), (15, 1), (1, 20), (6, 36), (3, 80)):
            string = text[at : at + length]
            if string and "\ufffd" not in string:
                others: tuple[str, ...] = ("never this", string[:-1] + "\n") if at % 2 else ()
                yield lab.ask(
                    f"{salt} {at} {length}", prompt, 2, max_tokens=90, temperature=0.0, stop_strings=(*others, string)
                )
        # A string in the prompt, or one that begins in the prompt, stops nothing.
        tail = decode(list(prompt))[-1:] + text[:1]
        if len(tail) == 2 and tail not in text:
            yield lab.ask(f"{salt} prompt", prompt, 2, max_tokens=24, temperature=0.0, stop_strings=(tail,))


def stop_letters(lab: RolloutLab) -> tuple[str, ...]:
    """Stop strings that some token of the model completes."""
    decode = load_tokenizer(str(lab.folder)).decode
    texts = {decode([token]) for token in range(lab.vocabulary // 2, lab.vocabulary - lab.vocabulary // 3)}
    return tuple(sorted(text for text in texts if len(text) == 1 and text.isalnum()))[:LETTERS]
