"""Requirements: whole responses follow the model's distribution at every setting, and draws are independent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import Capability, ConfigError, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.audit import Sample, audit, samples_with_logits
from rlsdk.testing.rollout.draw_statistics import DrawStatistics, Noise, Z
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk.testing.rollout.plain_model import distribution
from rlsdk.testing.rollout.statistics import FALSE_ALARM, LEAST_EXPECTED, chi_square_p
from rlsdk.testing.suites.requirements import Measured, requirement

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "plain": {},
    "temperature 0.1": {"temperature": 0.1},
    "temperature 0.45": {"temperature": 0.45},
    "temperature 0.87": {"temperature": 0.87},
    "temperature 2": {"temperature": 2.0},
    "temperature 0.03": {"temperature": 0.03},
    "top-p 0.001": {"temperature": 1.1, "top_p": 0.001},
    "top-k 1": {"temperature": 1.27, "top_k": 1},
    "top-k 2": {"top_k": 2},
    "top-k 7": {"temperature": 0.77, "top_k": 7},
    "top-k 60": {"temperature": 1.66, "top_k": 60},
    "top-k of more than all": {"top_k": 10_000},
    "top-p 0.35": {"top_p": 0.35},
    "top-p 0.97": {"temperature": 0.68, "top_p": 0.97},
    "top-p when hot": {"temperature": 1.88, "top_p": 0.73},
    "top-k, then top-p": {"temperature": 1.17, "top_k": 12, "top_p": 0.75},
}
HOT: Mapping[str, Mapping[str, float]] = {
    "top-k 100 when hot": {"temperature": 2.6, "top_k": 100},
    "temperature 5": {"temperature": 5.0},
}
"""Settings that are tested if the engine does not refuse them."""
FLOORS: Mapping[str, Mapping[str, float]] = {
    "min-p 0.05": {"min_p": 0.05},
    "min-p when hot": {"temperature": 1.88, "min_p": 0.25},
    "min-p when cold": {"temperature": 0.58, "min_p": 0.13},
    "min-p 1": {"min_p": 1.0},
    "top-p, then min-p": {"top_p": 0.9, "min_p": 0.03},
    "all of them": {"temperature": 1.39, "top_k": 40, "top_p": 0.88, "min_p": 0.12},
}
"""Settings that are tested if `Capability.MIN_P` is claimed."""
SAMPLES = {"top-p, then min-p": 100, "all of them": 100, "top-k, then top-p": 100}
"""Numbers of samples where the order of filters decides over few tokens."""
NUM_FINE, LEAST_FINE, FINE_ALARM = 10_000, 2.0, 1e-7
"""Number of first tokens after one prompt, smallest expected count of a bin, and smallest p-value. Bins are small,
because a random generator with few bits shows in rare tokens."""
HOT_SPECIAL, ENOUGH_SPECIAL, MOST_SPECIAL = 2.0, 40, 6_000
"""Temperature of the test of special tokens, expected draws of one of them, and largest number of draws for it."""
SEEDS = (
    -1,
    -2,
    *(0, 1, 2, 7, 255, 256, 65_536, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**32 + 7),
    *(2**40, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1),
    # Beyond 63 bits. Their remainders of 2**64 differ from those of the negative ones.
    *(-(2**63), 1 - 2**62, 2**63 + 1, 2**64 - 4, 2**64 - 3),
)
"""Seeds that are equal to an engine that keeps too few of their bits."""
INDICES = (*range(9), 15, 16, 31, 32, 63, 64, 99, 100, 101, 127, 128, 255, 256, 999, 1000, 1001, 1024, 10_000, 65_536)
"""Sample indices that are equal to an engine that keeps too few of their digits."""


COLDEST = 0.003
"""A temperature that some engines replace with a larger one."""


def takes(lab: RolloutLab, temperature: float) -> bool:
    """Whether the engine accepts this temperature; it may refuse one above 2 or below 0.01."""
    try:
        lab.run([lab.ask("r", lab.prompt(5, 129), max_tokens=1, temperature=temperature, seed=1)])
    except ConfigError:
        return False
    return True


class DistributionRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("distribution.responses", since=(2, 0))
    def test_distribution_responses(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Whole responses follow the model's conditional probabilities at many settings of temperature and filters:
        their total probability, and statistics of single draws by position and kind."""
        settings = {**SETTINGS, **(FLOORS if Capability.MIN_P in lab.spec.capabilities else {})}
        takes_hot = takes(lab, 2.6)
        measured.record("takes a temperature above 2", takes_hot)
        settings |= HOT if takes_hot else {}
        requests = [
            lab.ask(name, lab.prompt(5 + at, 130), SAMPLES.get(name, 24), max_tokens=20, seed=500 + at, **sampling)
            for at, (name, sampling) in enumerate(settings.items())
        ]
        faults, samples = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        parts = [
            DrawStatistics.of([sample for sample in samples if sample.request.request_id == name], lab.eos)
            for name in settings
        ]
        for name, own in zip(settings, parts, strict=True):
            for where, chosen in (("", own.position >= 0), (" behind the first token", own.position > 0)):
                z = own.by_name["surprise"].of(chosen).z()
                measured.at_most(f"deviations of log-probability{where}, {name}", abs(z), Z)
            measured.none(f"draws that follow something else, {name}", own.faults((1, 8)))
        every = DrawStatistics.joined(parts)
        together = every.by_name["surprise"]
        measured.record("tokens", len(together.found))
        measured.at_most("deviations of log-probability, all", abs(together.z()), Z)
        measured.none("draws that follow something else, all", every.faults())

    @requirement("distribution.low_temperature", since=(2, 0))
    def test_distribution_low_temperature(self, changing: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A temperature of a few thousandths is refused or applied exactly: with weights of equally small logits,
        draws and log-probs are the model's at that temperature."""
        takes_cold = takes(lab, COLDEST)
        measured.record(f"takes a temperature of {COLDEST}", takes_cold)
        if not takes_cold:
            return
        # The last norm scales all logits.
        state = {name: t * COLDEST if t.ndim == 1 and ".layers." not in name else t for name, t in lab.base.items()}
        changing.update_weights(whole_shards(state), 4)
        requests = [
            lab.ask(f"r{at}", lab.prompt(5 + at, 133), 24, max_tokens=16, seed=520 + at, temperature=COLDEST)
            for at in range(4)
        ]
        faults, samples = audit(lab, requests, lab.run(requests), lab.plain.with_state(state), version=4)
        measured.none("wrong samples", faults)
        drawn = DrawStatistics.of(samples, lab.eos)
        measured.at_most("deviations of log-probability", abs(drawn.by_name["surprise"].z()), Z)

    @requirement("distribution.greedy", since=(2, 0))
    def test_distribution_greedy(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Each of hundreds of greedy tokens is the most probable one, even if another is nearly as probable."""
        requests = [lab.ask(f"r{at}", lab.prompt(3 + at, 138), max_tokens=24, temperature=0.0) for at in range(32)]
        faults, samples = audit(lab, requests, lab.run(requests))
        measured.none("wrong samples", faults)
        best = torch.cat([sample.logits.topk(2).values for sample in samples])
        measured.record("least distance of the second best", float((best[:, 0] - best[:, 1]).min()))

    @requirement("distribution.sequences", since=(2, 0))
    def test_distribution_sequences(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Sequences of three tokens, late tokens of a response, and the end-of-sequence token, first and later, have
        the right frequencies (chi-square, one false alarm in a million)."""
        prompt = lab.prompt(6, 131)
        request = lab.ask("r", prompt, 800, max_tokens=3, top_k=4, temperature=1.1, seed=31)
        outputs = lab.run([request])
        counts, chances = sequences(lab, request, [output.token_ids.tolist() for output in outputs])
        measured.at_least("p-value of sequences", chi_square_p(counts, chances), FALSE_ALARM)
        for length in (3, 40):
            before = lab.prompt(length, 132)
            late = lab.ask("late", prompt, 1000, max_tokens=length + 1, temperature=0.8, seed=32 + length)
            p = first_p(lab, [_behind(late, before)])
            measured.at_least(f"p-value of tokens behind {length} others", p, FALSE_ALARM)
        ends, chance = lab.likely_end(16, 1.0)
        measured.record("chance of the end-of-sequence token", chance)
        for length in (0, 1, 2, 12):
            late = lab.ask("end", ends[: len(ends) - length], 600, max_tokens=length + 1, stop_token_ids=(lab.eos,))
            late = replace(late, response_ids=ends[len(ends) - length :])
            p = first_p(lab, [late], only=lab.eos)
            measured.at_least(f"p-value of the end behind {length} tokens", p, FALSE_ALARM)

    @requirement("distribution.special_tokens", since=(2, 0))
    def test_distribution_special_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Special tokens of the tokenizer (padding, unknown, begin, end) are drawn with their probabilities: the engine
        excludes none."""
        tokens = sorted({token for token in load_tokenizer(str(lab.folder)).all_special_ids if token < lab.vocabulary})
        asked = 0
        for token, (prompt, chance) in zip(tokens, lab.best_prompts(tokens, 16, HOT_SPECIAL), strict=True):
            num = math.ceil(ENOUGH_SPECIAL / chance)
            if num > MOST_SPECIAL:
                continue
            asked += 1
            request = lab.ask(f"special {token}", prompt, num, max_tokens=1, temperature=HOT_SPECIAL, seed=600 + token)
            p = first_p(lab, [request], only=token)
            measured.at_least(f"p-value of special token {token}", p, FALSE_ALARM)
        measured.record("special tokens", asked)

    @requirement("distribution.rare_tokens", since=(2, 0))
    def test_distribution_rare_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """10,000 first tokens follow the model's probabilities, even the rare ones: random numbers are not coarse."""
        prompt, parts = lab.prompt(6, 133), 4
        requests = [lab.ask(f"r{at}", prompt, NUM_FINE // parts, max_tokens=1, seed=400 + at) for at in range(parts)]
        measured.at_least("p-value", first_p(lab, requests, LEAST_FINE), FINE_ALARM)

    @requirement("independent_draws", since=(2, 0))
    def test_independent_draws(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Without seeds all draws are independent: within a sample, between samples, requests and calls, including
        concurrent calls."""
        requests = [lab.ask(f"r{at}", lab.prompt(6 + at, 134), 5, max_tokens=40, seed=None) for at in range(4)]
        samples = [sample for _ in range(2) for sample in in_order(lab, requests)]
        measured.none("draws that depend on others", Noise.of(samples).faults())
        same = [lab.ask(f"same{at}", lab.prompt(5, 135), 3, max_tokens=12, seed=None) for at in range(8)]
        tokens = [tuple(t) for _ in range(3) for t in tokens_of(lab.run(same)).values()]
        measured.equal("distinct samples behind one prompt", len(set(tokens)), len(tokens))
        if Capability.ABORT in lab.spec.capabilities:
            asked = [[lab.ask(f"call{at}", lab.prompt(5, 135), 3, max_tokens=12, seed=None)] for at in range(4)]

            async def at_once() -> list[list[GenerationOutput]]:
                return await asyncio.gather(*(collect(engine, requests) for requests in asked))

            drawn = [tuple(output.token_ids.tolist()) for outputs in lab.wait(at_once()) for output in outputs]
            measured.equal("distinct samples of calls at the same time", len(set(drawn)), len(drawn))

    @requirement("independent_draws.seeds", needs=Capability.SEED, since=(2, 0))
    def test_independent_draws_seeds(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With seeds, including adjacent ones, draws of different seeds or samples are independent."""
        requests = [
            lab.ask(f"r{at}", lab.prompt(6 + at % 3, 136), 6, max_tokens=40, seed=at, temperature=1.2)
            for at in range(6)
        ]
        measured.none("draws that depend on others", Noise.of(in_order(lab, requests)).faults())

    @requirement("seed.alone", needs=Capability.SEED, since=(2, 0))
    def test_seed_alone(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """The tokens of a seed depend only on seed, sample index, prompt and weights: not on limits, stops that do not
        occur, filters that keep everything, ids, `n`, or the position in a call."""
        changed = equal_in_all_that_counts(lab)
        whole = {index: tokens for (_, index), tokens in tokens_of(lab.run([changed["as it is"]])).items()}
        off = []
        requests = [
            replace(request, request_id=f"{at} {request.request_id}") for at, request in enumerate(changed.values())
        ]
        together = tokens_of(lab.run([lab.ask("before", lab.prompt(9, 251), 3, max_tokens=4), *requests]))
        for at, (name, request) in enumerate(changed.items()):
            ends = set(request.sampling.stop_token_ids)
            for where, found in (("alone", tokens_of(lab.run([request]))), ("together", together)):
                key = request.request_id if where == "alone" else f"{at} {request.request_id}"
                for (who, index), tokens in found.items():
                    expected = whole.get(index)
                    if who != key or expected is None or ends & set(tokens):
                        continue
                    least = min(len(expected), len(tokens))
                    off += [f"sample {index}, {name}, {where}"] if expected[:least] != tokens[:least] else []
        measured.record("requests", len(changed))
        measured.none("samples that changed with what does not count", off)

    @requirement("seed.values", needs=Capability.SEED, since=(2, 0))
    def test_seed_values(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """All seeds of 64 bits, and negative ones, are distinct and give the same tokens again; so are all sample
        indices."""
        prompt = lab.prompt(6, 137)
        requests = [lab.ask(str(seed), prompt, 2, max_tokens=12, seed=seed, temperature=1.5) for seed in SEEDS]
        once, again = tokens_of(lab.run(requests)), tokens_of(lab.run(requests[::-1]))
        measured.none("seeds whose tokens did not come again", [key for key in once if again.get(key) != once[key]])
        by_tokens: dict[tuple[int, ...], list[str]] = {}
        for (seed, index), tokens in once.items():
            by_tokens.setdefault(tuple(tokens), []).append(f"{seed}/{index}")
        measured.none("seeds with the same tokens", [who for who in by_tokens.values() if len(who) > 1])
        numbered = [
            replace(lab.ask(str(at), prompt, max_tokens=12, seed=3, temperature=1.5), first_sample=at) for at in INDICES
        ]
        of_index: dict[tuple[int, ...], list[str]] = {}
        for (number, _), tokens in tokens_of(lab.run(numbered)).items():
            of_index.setdefault(tuple(tokens), []).append(number)
        measured.none("samples of one seed with the same tokens", [who for who in of_index.values() if len(who) > 1])


def equal_in_all_that_counts(lab: RolloutLab) -> dict[str, GenerationRequest]:
    """Variants of one seeded request in fields that do not affect its draws."""
    plain = lab.ask("r", lab.prompt(7, 250), 2, max_tokens=30, temperature=1.3, seed=77)
    never = int(lab.plain.next_logits(plain.prompt_ids).argmin())
    fields: dict[str, dict[str, object]] = {
        "max_tokens 9": {"max_tokens": 9},
        "max_tokens 31": {"max_tokens": 31},
        "more than the room": {"max_tokens": 10**6},
        "top-k of all": {"top_k": lab.vocabulary},
        "top-k of more than all": {"top_k": 10**6},
    }
    if Capability.MIN_P in lab.spec.capabilities:
        fields["min-p of next to nothing"] = {"min_p": 1e-12}
    if Capability.STOP_STRINGS in lab.spec.capabilities:
        fields["a stop string that never comes"] = {"stop_strings": ("a string that never comes",)}
    whole = {name: replace(plain, sampling=replace(plain.sampling, **given)) for name, given in fields.items()}  # type: ignore[arg-type]
    whole["a stop token"] = replace(plain, sampling=replace(plain.sampling, stop_token_ids=(never,)))
    whole["another name"] = replace(plain, request_id="a name of its own")
    whole["a long name"] = replace(plain, request_id="x" * 300)
    whole["n 5"] = replace(plain, n=5)
    whole["the second alone"] = replace(plain, n=1, first_sample=1)
    return {"as it is": plain, **whole}


def unseeded(lab: RolloutLab) -> list[GenerationRequest]:
    """A few requests without seeds."""
    asked = [lab.ask(f"r{at}", lab.prompt(6 + at, 157), 4, max_tokens=40) for at in range(3)]
    return [replace(request, sampling=replace(request.sampling, seed=None)) for request in asked]


def in_order(
    lab: RolloutLab, requests: Sequence[GenerationRequest], engine: RolloutEngine | None = None
) -> list[Sample]:
    """Samples of one call, ordered by number."""
    order = {request.request_id: at for at, request in enumerate(requests)}
    samples = samples_with_logits(lab, requests, lab.run(requests, engine))
    return sorted(samples, key=lambda sample: (order[sample.request.request_id], sample.output.sample_index))


def first_p(
    lab: RolloutLab,
    requests: Sequence[GenerationRequest],
    least: float = LEAST_EXPECTED,
    only: int | None = None,
) -> float:
    """The p-value of the first new tokens of requests that differ only in their seed: of all tokens, or of whether the
    token is `token`."""
    request = requests[0]
    drawn = torch.tensor([int(output.token_ids[0]) for output in lab.run(requests)])
    exact = distribution(lab.plain.next_logits((*request.prompt_ids, *request.response_ids)), request.sampling)
    counts = torch.bincount(drawn, minlength=lab.vocabulary)
    if only is not None:
        counts = torch.stack([counts[only], counts.sum() - counts[only]])
        exact = torch.stack([exact[only], 1 - exact[only]])
    return chi_square_p(counts, exact, least)


def sequences(lab: RolloutLab, request: GenerationRequest, drawn: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """How often each sequence that top-k keeps was drawn, with one more count for all others, and the probability of
    each."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(request.sampling.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in chances.items():
            exact = distribution(lab.plain.next_logits((*request.prompt_ids, *tokens)), request.sampling)
            for token in exact.nonzero()[:, 0].tolist():
                longer[(*tokens, token)] = chance * float(exact[token])
        chances = longer
    at = {tokens: index for index, tokens in enumerate(chances)}
    index = torch.tensor([at.get(tuple(tokens), len(at)) for tokens in drawn])
    exact = torch.tensor([*chances.values(), 0.0], dtype=torch.float64)
    return torch.bincount(index, minlength=len(at) + 1), exact


def _behind(request: GenerationRequest, tokens: Sequence[int]) -> GenerationRequest:
    return replace(request, response_ids=tuple(tokens))
