"""Requirements: sampled tokens, their log-probs, and the ends of responses."""

from __future__ import annotations

import torch

from rlsdk.interfaces import (
    Capability,
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
)
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.outputs import tokens_of, wrong_identities
from rlsdk.testing.rollout.plain_model import distribution, kept
from rlsdk.testing.rollout.statistics import FALSE_ALARM, chi_square_p
from rlsdk.testing.suites.requirements import Measured, requirement

NUM_DRAWS = 2000
"""Number of first tokens after one prompt that are compared with their exact distribution."""
BORDER = 1e-3
"""Relative distance from a filter's border within which tokens may be kept or not."""


class SamplingRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("samples", basic=True)
    def test_samples(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Every request yields its `n` samples, each exactly once, with one log-prob per token."""
        requests = [lab.ask(f"r{n}", lab.prompt(4 + n, 1), n, max_tokens=6) for n in (1, 3, 5)]
        outputs = lab.run(requests)
        measured.none("wrong samples", wrong_identities(requests, outputs))
        measured.none("samples of a call without requests", lab.run([]))
        uneven = [o for o in outputs if not 0 < len(o.token_ids) == len(o.log_probs)]
        measured.none("samples without a log-prob for each token", uneven)
        ids = [token for output in outputs for token in output.token_ids.tolist()]
        measured.none("tokens outside the vocabulary", [t for t in ids if not 0 <= t < lab.vocabulary])

    @requirement("log_probs", basic=True)
    def test_log_probs(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Log-probs of sampled tokens are natural logarithms and equal the model's, whatever else is in the batch."""
        requests = [lab.ask(f"r{at}", lab.prompt(3 + 5 * at, 2), 3, max_tokens=20, seed=at) for at in range(4)]
        measured.at_most("largest difference", lab.worst(requests, lab.run(requests)), lab.suite.tolerance)

    @requirement("log_probs.temperature", basic=True)
    def test_log_probs_temperature(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With a temperature, log-probs are of the kind that the backend declares: by contract, after temperature."""
        for temperature in (0.6, 1.5):
            request = lab.ask("r", lab.prompt(9, 3), 6, max_tokens=20, temperature=temperature)
            worst = lab.worst([request], lab.run([request]))
            measured.at_most(f"largest difference at temperature {temperature}", worst, lab.suite.tolerance)

    @requirement("log_probs.filters", basic=True)
    def test_log_probs_filters(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """With top-k and top-p, log-probs are of the kind that the backend declares: by contract, before filters."""
        for name, filters in (
            ("top-k", {"top_k": 8}),
            ("top-p", {"top_p": 0.6}),
            ("both", {"top_k": 20, "top_p": 0.8}),
        ):
            request = lab.ask("r", lab.prompt(9, 4), 6, max_tokens=20, **filters)
            measured.at_most(
                f"largest difference with {name}", lab.worst([request], lab.run([request])), lab.suite.tolerance
            )

    @requirement("filters", basic=True)
    def test_filters(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """No token is drawn that top-k or top-p exclude."""
        for name, filters in (("top-k", {"top_k": 2}), ("top-p", {"top_p": 0.5}), ("both", {"top_k": 3, "top_p": 0.7})):
            request = lab.ask("r", lab.prompt(7, 5), 12, max_tokens=12, temperature=1.5, **filters)
            measured.none(f"tokens outside {name}", outside(lab, request))

    @requirement("min_p", needs=Capability.MIN_P, basic=True)
    def test_min_p(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """No token is drawn whose probability is below `min_p` times that of the most probable token."""
        request = lab.ask("r", lab.prompt(7, 6), 12, max_tokens=12, temperature=1.5, min_p=0.3)
        measured.none("tokens below min-p", outside(lab, request))

    @requirement("greedy", basic=True)
    def test_greedy(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """At temperature 0 the most probable token is taken, and its log-prob is that of temperature 1."""
        requests = [lab.ask(f"r{at}", lab.prompt(5 + at, 7), 2, max_tokens=16, temperature=0.0) for at in range(3)]
        outputs = lab.run(requests)
        behind = []
        for output in outputs:
            tokens = output.token_ids.tolist()
            logits = lab.plain.logits(requests[int(output.request_id[1:])].prompt_ids, tokens)
            gap = logits.amax(-1) - logits[range(len(tokens)), tokens]
            behind += [f"{value:.3g} below the best" for value in gap.tolist() if value > lab.suite.tolerance]
        measured.none("tokens that are not the most probable", behind)
        measured.at_most("largest difference of log-probs", lab.worst(requests, outputs), lab.suite.tolerance)

    @requirement("distribution", basic=True)
    def test_distribution(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """2,000 first tokens follow the model's probabilities (chi-square, one false alarm in a million)."""
        measured.at_least("p-value", draws_p(lab, {}), FALSE_ALARM)

    @requirement("distribution.filtered", basic=True)
    def test_distribution_filtered(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """2,000 first tokens follow the model's probabilities under temperature, top-k and top-p together, renormalised
        over the kept tokens."""
        measured.at_least("p-value", draws_p(lab, {"temperature": 1.5, "top_k": 24, "top_p": 0.9}), FALSE_ALARM)

    @requirement("stop_tokens", basic=True)
    def test_stop_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A response ends with its first stop token, which it contains; its finish reason and length agree."""
        stops = (lab.eos, *range(lab.vocabulary // 2, lab.vocabulary - lab.vocabulary // 3))
        request = lab.ask("r", lab.prompt(6, 8), 24, max_tokens=12, stop_token_ids=stops)
        outputs = lab.run([request])
        measured.none(
            "responses that end wrongly", [fault for o in outputs if (fault := ends_wrongly(o, set(stops), 12))]
        )
        reasons = {output.finish_reason for output in outputs}
        measured.at_least("responses that stopped", sum(o.finish_reason is FinishReason.STOP for o in outputs), 1)
        assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}, f"finish reasons {reasons}"
        measured.at_most("largest difference of log-probs", lab.worst([request], outputs), lab.suite.tolerance)

    @requirement("stop_tokens.only")
    def test_nothing_else_stops(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Without stop tokens nothing ends a response before its limit, not even the model's end-of-sequence token."""
        # After a prompt that makes it probable: the best of many.
        best, chance = lab.likely_end(6)
        measured.record("chance of the end-of-sequence token as the first", chance)
        outputs = lab.run([lab.ask("r", best, 32, max_tokens=40, temperature=1.5)])
        measured.none("responses that ended early", [fault for o in outputs if (fault := ends_wrongly(o, set(), 40))])
        seen = sum(lab.eos in output.token_ids[:-1] for output in outputs)
        measured.at_least("responses that went on behind it", seen, 1)

    @requirement("stop_strings", needs=Capability.STOP_STRINGS, basic=True)
    def test_stop_strings(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A response ends with the token that completes a stop string, and not before or after it."""
        decode = load_tokenizer(str(lab.folder)).decode
        texts = {decode([token]) for token in range(lab.vocabulary // 2, lab.vocabulary - lab.vocabulary // 3)}
        strings = tuple(sorted(text for text in texts if len(text) == 1 and text.isalnum()))[:12]
        assert strings, "the model's tokenizer has no token that is one letter or digit; give the suite another model"
        request = lab.ask("r", lab.prompt(6, 9), 24, max_tokens=12, stop_strings=strings)
        faults = []
        stopped = 0
        for output in lab.run([request]):
            ids = output.token_ids.tolist()
            ends = output.finish_reason is FinishReason.STOP
            stopped += ends
            if any(string in decode(ids[:-1]) for string in strings):
                faults.append(f"{decode(ids)!r} goes on behind one of {strings}")
            elif any(string in decode(ids) for string in strings) != ends:
                faults.append(f"{decode(ids)!r} has finish reason {output.finish_reason}")
        measured.none("responses that end wrongly", faults)
        measured.at_least("responses that stopped", stopped, 1)

    @requirement("max_tokens", basic=True)
    def test_max_tokens(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A response has as many tokens as requested, or as fit into the context, with the right finish reason."""
        room = lab.suite.max_model_tokens
        for name, prompt, asked, length in (
            ("one token", lab.prompt(5, 10), 1, 1),
            ("nine tokens", lab.prompt(5, 11), 9, 9),
            ("more than there is room for", lab.prompt(room - 5, 12), 50, 5),
        ):
            outputs = lab.run([lab.ask("r", prompt, 2, max_tokens=asked)])
            faults = [fault for output in outputs if (fault := ends_wrongly(output, set(), length))]
            measured.none(f"wrong ends: {name}", faults)

    @requirement("longest_prompt", basic=True)
    def test_longest_prompt(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """The longest prompt that fits is read completely: its token has the log-prob given the whole prompt."""
        length = lab.suite.max_model_tokens - 1
        requests = [lab.ask(f"r{at}", lab.prompt(length, 13 + at), 2, max_tokens=4) for at in range(3)]
        outputs = lab.run(requests)
        measured.none("wrong ends", [fault for output in outputs if (fault := ends_wrongly(output, set(), 1))])
        measured.at_most("largest difference", lab.worst(requests, outputs), lab.suite.tolerance)

    @requirement("refusals", basic=True)
    def test_refusals(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Requests that cannot be served are a ConfigError before anything is generated, and do not harm the engine."""
        wrong = {
            "an empty prompt": lab.ask("wrong", ()),
            "a prompt without room for a token": lab.ask("wrong", lab.prompt(lab.suite.max_model_tokens, 16)),
        }
        if Capability.MIN_P not in lab.spec.capabilities:
            wrong["min_p, not claimed"] = lab.ask("wrong", lab.prompt(4, 16), min_p=0.5)
        if Capability.STOP_STRINGS not in lab.spec.capabilities:
            wrong["stop strings, not claimed"] = lab.ask("wrong", lab.prompt(4, 16), stop_strings=("x",))
        accepted = []
        for name, request in wrong.items():
            try:
                lab.run([lab.ask("fine", lab.prompt(4, 16)), request])
            except ConfigError:
                continue
            accepted.append(name)
        measured.none("accepted", accepted)
        request = lab.ask("r", lab.prompt(4, 17), 2)
        outputs = lab.run([request])
        measured.none("wrong samples afterwards", wrong_identities([request], outputs))

    @requirement("seed", needs=Capability.SEED, basic=True)
    def test_seed(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Tokens depend only on seed, sample index, prompt and weights, not on other samples in the batch."""
        request = lab.ask("r", lab.prompt(6, 18), 3, max_tokens=24, temperature=1.3, seed=11)
        alone = tokens_of(lab.run([request]))
        beside = [lab.ask(f"b{at}", lab.prompt(3 + at, 19), 3, max_tokens=9 + at, seed=at) for at in range(4)]
        among = tokens_of(lab.run([*beside[:2], request, *beside[2:]]))
        one = tokens_of(lab.run([lab.ask("r", lab.prompt(6, 18), 1, max_tokens=24, temperature=1.3, seed=11)]))
        other = tokens_of(lab.run([lab.ask("r", lab.prompt(6, 18), 3, max_tokens=24, temperature=1.3, seed=12)]))
        measured.none("samples that changed among others", [key for key in alone if among.get(key) != alone[key]])
        measured.none("samples that changed with n", [key for key in one if alone.get(key) != one[key]])
        measured.equal("distinct samples of one request", len({tuple(tokens) for tokens in alone.values()}), 3)
        measured.none(
            "samples that another seed did not change", [key for key in alone if other.get(key) == alone[key]]
        )

    @requirement("no_seed", basic=True)
    def test_no_seed(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Without a seed every call gives new samples."""
        request = lab.ask("r", lab.prompt(6, 20), 3, max_tokens=32, temperature=1.3, seed=None)
        assert request.sampling.seed is None
        first, second = tokens_of(lab.run([request])), tokens_of(lab.run([request]))
        measured.none("samples that came again", [key for key in first if second.get(key) == first[key]])
        measured.equal("distinct samples of one request", len({tuple(tokens) for tokens in first.values()}), 3)


def draws_p(lab: RolloutLab, sampling: dict[str, object]) -> float:
    """The p-value of `NUM_DRAWS` first tokens after one prompt."""
    prompt, calls = lab.prompt(6, 21), 5
    requests = [
        lab.ask(f"r{at}", prompt, NUM_DRAWS // calls, max_tokens=1, seed=100 + at, **sampling) for at in range(calls)
    ]
    drawn = torch.tensor([int(output.token_ids[0]) for output in lab.run(requests)])
    exact = distribution(lab.plain.next_logits(prompt), requests[0].sampling)
    return chi_square_p(torch.bincount(drawn, minlength=lab.vocabulary), exact)


def outside(lab: RolloutLab, request: GenerationRequest) -> list[str]:
    """Drawn tokens that a request's filters exclude."""
    found = []
    for output in lab.run([request]):
        tokens = output.token_ids.tolist()
        probabilities = (lab.plain.logits(request.prompt_ids, tokens) / request.sampling.temperature).softmax(-1)
        allowed = kept(probabilities, request.sampling, BORDER)[range(len(tokens)), tokens]
        found += [f"token {tokens[at]} at {at} of sample {output.sample_index}" for at in (~allowed).nonzero()[:, 0]]
    return found


def ends_wrongly(output: GenerationOutput, stops: set[int], limit: int) -> str:
    """Describes the fault in the end of a response with these stop tokens and this limit; empty: none."""
    tokens, reason = output.token_ids.tolist(), output.finish_reason
    said = f"sample {output.sample_index}: {len(tokens)} tokens, finish reason {reason}"
    if stops & set(tokens[:-1]):
        return f"{said}, goes on behind a stop token"
    if tokens and tokens[-1] in stops:
        return "" if reason is FinishReason.STOP else f"{said}, ends with a stop token"
    if reason is FinishReason.STOP:
        return f"{said}, without a stop token at its end"
    return "" if len(tokens) == limit and reason is FinishReason.LENGTH else f"{said}, expected {limit} and 'length'"
