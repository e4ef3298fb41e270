"""Requirements: samples of a group that are requested separately, and samples that continue given response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsdk.interfaces import Capability, ConfigError, FinishReason, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.outputs import tokens_of, wrong_identities
from rlsdk.testing.suites.requirements import Measured, requirement

CUTS = (1, 5, 17)
"""Number of given response tokens after which a response continues."""


class ContinuationRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("first_sample", since=(2, 0), basic=True)
    def test_first_sample(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Samples are numbered from `first_sample`; a seeded sample is the same as in the whole group."""
        request = lab.ask("r", lab.prompt(6, 22), 5, max_tokens=16, temperature=1.3, seed=11)
        group = tokens_of(lab.run([request]))
        some = [replace(request, first_sample=2, n=2), lab.ask("other", lab.prompt(4, 23), 3)]
        outputs = lab.run(some)
        measured.none("wrong samples", wrong_identities(some, outputs))
        if Capability.SEED in lab.spec.capabilities:
            alone = {key: tokens for key, tokens in tokens_of(outputs).items() if key in group}
            measured.none("samples that differ from the group's", [k for k, t in alone.items() if group[k] != t])

    @requirement("continue", since=(2, 0), basic=True)
    def test_continue(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A response continues after given tokens: only new tokens are returned, with the log-probs of the whole text,
        and limits count both."""
        prior = lab.prompt(7, 25)
        requests = [
            replace(lab.ask(f"r{at}", lab.prompt(4 + at, 24), 2, max_tokens=12 + at), response_ids=prior[: 3 + at])
            for at in range(4)
        ]
        outputs = lab.run(requests)
        measured.none("wrong samples", wrong_identities(requests, outputs))
        measured.none("samples of another length than 9", [len(o.token_ids) for o in outputs if len(o.token_ids) != 9])
        measured.at_most("largest difference of log-probs", lab.worst(requests, outputs), lab.suite.tolerance)
        prompt = lab.prompt(lab.suite.max_model_tokens - 10, 26)
        (rest,) = lab.run([replace(lab.ask("r", prompt, max_tokens=50), response_ids=prior)])
        measured.equal("new tokens where the model has room for 3", len(rest.token_ids), 3)
        measured.equal("that ended by 'length'", rest.finish_reason is FinishReason.LENGTH, 1)
        full = {
            "max_tokens": replace(lab.ask("wrong", lab.prompt(4, 27), max_tokens=7), response_ids=prior),
            "max_model_tokens": replace(lab.ask("wrong", prompt, max_tokens=50), response_ids=(*prior, *prior[:3])),
        }
        accepted = []
        for name, request in full.items():
            try:
                lab.run([request])
                accepted.append(f"no room by {name}")
            except ConfigError:
                continue
        measured.none("accepted", accepted)

    @requirement("continue.seed", needs=Capability.SEED, since=(2, 0), basic=True)
    def test_continue_seed(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A seeded sample that continues has the same tokens as without the interruption, alone or with others of its
        group, which continue after the same tokens."""
        request = lab.ask("r", lab.prompt(6, 28), 3, max_tokens=24, temperature=1.3, top_k=40, seed=13)
        whole = tokens_of(lab.run([request]))
        changed = []
        for (_, index), tokens in whole.items():
            parts = [continued(request, index, tokens[:cut], f"cut {cut}") for cut in CUTS]
            for part, output in matched(parts, lab.run(parts)):
                if [*part.response_ids, *output.token_ids.tolist()] != tokens:
                    changed.append(f"sample {index} behind {len(part.response_ids)} tokens")
        measured.record("samples", len(whole) * len(CUTS))
        measured.none("samples that an interruption changed", changed)
        group = replace(request, response_ids=lab.prompt(9, 35))
        together = tokens_of(lab.run([group]))
        alone = [replace(group, request_id=f"sample {index}", n=1, first_sample=index) for index in range(group.n)]
        apart = {index: tokens for (_, index), tokens in tokens_of(lab.run(alone)).items()}
        differ = [index for (_, index), tokens in together.items() if apart[index] != tokens]
        measured.none("samples of a group that continue in another way alone", differ)

    @requirement("continue.stop_strings", needs=Capability.STOP_STRINGS, since=(2, 0))
    def test_continue_stop_strings(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """A stop string is found if it begins in given tokens and ends in new ones."""
        decode = load_tokenizer(str(lab.folder)).decode
        # Greedy, so that the next tokens are known, with and without a seed.
        request = lab.ask("r", lab.prompt(6, 29), max_tokens=24, temperature=0.0)
        tokens = lab.run([request])[0].token_ids.tolist()
        faults, tried = [], 0
        for cut in range(4, 20):
            before, after = decode(tokens[:cut]), decode(tokens[: cut + 2])
            string = after[len(before) - 1 :]
            if len(string) < 2 or not after.startswith(before) or string in before:
                continue
            tried += 1
            ends = next(at for at in range(cut + 1, 25) if string in decode(tokens[:at]))
            stopping = replace(request, sampling=replace(request.sampling, stop_strings=(string,)))
            (rest,) = lab.run([continued(stopping, 0, tokens[:cut], "r")])
            if (rest.token_ids.tolist(), rest.finish_reason) != (tokens[cut:ends], FinishReason.STOP):
                faults.append(f"{string!r} behind {cut} tokens: {len(rest.token_ids)} tokens, {rest.finish_reason}")
        measured.none("stop strings across the border that were not found", faults)
        measured.at_least("stop strings tried", tried, 1)


def continued(request: GenerationRequest, index: int, tokens: Sequence[int], name: str) -> GenerationRequest:
    """A request that continues one sample of another request after these tokens."""
    return replace(request, request_id=name, n=1, first_sample=index, response_ids=tuple(tokens))


def matched(
    requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]
) -> list[tuple[GenerationRequest, GenerationOutput]]:
    """Pairs each output with its request."""
    asked = {request.request_id: request for request in requests}
    return [(asked[output.request_id], output) for output in outputs]
