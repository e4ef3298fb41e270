"""Requirements: rows of one, two and hundreds of tokens, and passes within their token limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rlsdk.interfaces import Batch, Capability, Head
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import learn, look, step
from rlsdk.testing.train.case_runner import drive
from rlsdk.testing.train.cases import Case, Weighted, rows_of
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.objectives import Inspecting, with_own_fields
from rlsdk.testing.train.requirements.outputs import numbers

LONG = (1, 300, 2, 129, 3, 433, 1, 257, 64, 512)
"""Lengths of rows: around the powers of two at which a kernel or a buffer may end, as many tokens as the suite's own
model has positions, and the shortest ones."""
MANY_ROWS = 300
BUDGET = 160
PADDING = 1.25
"""Allowed ratio of positions to tokens: engines may run a rectangle that has little padding."""


class LengthRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("length.outputs", since=(2, 0))
    def test_length_outputs(self, lab: TrainLab, measured: Measured) -> None:
        """For rows of 1, 2 and up to 512 tokens, packed together, each alone, and in passes of bounded size, log-probs
        are those of plain transformers at every position."""
        batch = rows_of(LONG, seed=7)
        expected = numbers(lab.case(), batch)["log_probs"]
        for name, limit in (("in one pass", {}), ("each alone", {"rows": 1}), ("300 tokens", {"tokens": 300})):
            found = lab.play([look(batch, "log_probs")], **limit).seen[0]["log_probs"]
            worst = float((found - expected).abs().max())
            measured.at_most(f"largest difference, {name}", worst, lab.suite.tolerance)

    @requirement("length.many_rows", since=(2, 0))
    def test_length_many_rows(self, lab: TrainLab, measured: Measured) -> None:
        """For three hundred short rows in one pass, log-probs and gradient of each are those of plain torch."""
        batch = rows_of([1 + at % 4 for at in range(MANY_ROWS)], seed=12)
        case = lab.case(steps=[[batch]], probe=(batch, ("log_probs",)))
        lab.holds_to_plain(measured, [lab.run(drive, case)], case)

    @requirement("outputs.groups", since=(2, 0))
    def test_outputs_groups(self, lab: TrainLab, measured: Measured) -> None:
        """Rows that share a prompt of 1 to 40 tokens, and are equal or differ only in their last token, as samples of a
        group may, each have their own log-probs and gradient."""
        batch = groups_batch()
        case = lab.case(steps=[[batch]], probe=(batch, ("log_probs",)))
        for name, rows in (("in one pass", None), ("3 rows", 3)):
            cut = replace(case, rows=rows)
            lab.holds_to_plain(measured, [lab.run(drive, cut)], cut, name)

    @requirement("outputs.unlikely", since=(2, 0))
    def test_outputs_unlikely(self, lab: TrainLab, measured: Measured) -> None:
        """Log-probs of almost impossible tokens, and of almost uniform distributions, are exact: nothing is clamped or
        truncated."""
        for temperature in (0.03, 40.0):
            batch = rows_of((30, 2, 17), seed=13, temperature=temperature)
            expected = numbers(lab.case(), batch)["log_probs"]
            found = lab.play([look(batch, "log_probs")]).seen[0]["log_probs"]
            worst, bound = float((found - expected).abs().max()), lab.suite.tolerance * max(1 / temperature, 1.0)
            measured.at_most(f"largest difference at temperature {temperature}", worst, bound)

    @requirement("length.entropy", needs=Capability.ENTROPY, since=(2, 0))
    def test_length_entropy(self, lab: TrainLab, measured: Measured) -> None:
        """Entropy of rows of 1 to 512 tokens, with a mask and a temperature, requested with log-probs and alone, is
        that of plain transformers."""
        batch = rows_of(LONG, seed=8, masked=True, temperature=0.8)
        expected = numbers(lab.case(), batch)
        asked = [("log_probs", "entropy"), ("entropy",), ("entropy", "log_probs")]
        for names, found in zip(asked, lab.play([look(batch, *names) for names in asked]).seen, strict=True):
            measured.none("outputs that were not asked for", sorted(found.keys() - set(names)))
            for name in names:
                worst = float((found[name] - expected[name]).abs().max())
                measured.at_most(f"largest difference of {name}, of {names}", worst, lab.suite.tolerance)

    @requirement("length.values", needs=Capability.VALUE_HEAD, since=(2, 0))
    def test_length_values(self, lab: TrainLab, measured: Measured) -> None:
        """Values and their gradient over rows of 1 to 512 tokens are those of plain torch; a response mask does not
        move values, and the temperature, which is for logits, does not change them."""
        self._trained(lab, measured, Head.VALUE, Weighted(("values",)))

    @requirement("length.scores", needs=Capability.SCORE_HEAD, since=(2, 0))
    def test_length_scores(self, lab: TrainLab, measured: Measured) -> None:
        """Scores and their gradient over rows of 1 to 512 tokens are in row order and do not depend on the
        temperature."""
        self._trained(lab, measured, Head.SCORE, Weighted(("scores",)))

    @requirement("length.gradient", since=(2, 0))
    def test_length_gradient(self, lab: TrainLab, measured: Measured) -> None:
        """The gradient of rows of 1 to 512 tokens with a mask is that of plain autograd, for any micro-batches."""
        for name, limit in (("in one pass", {}), ("300 tokens", {"tokens": 300})):
            case = lab.case(steps=[[rows_of(LONG, seed=9, masked=True)]], **limit)
            lab.holds_to_plain(measured, [lab.run(drive, case)], case, name)

    @requirement("length.shortest", since=(2, 0))
    def test_length_shortest(self, lab: TrainLab, measured: Measured) -> None:
        """A batch of rows of one token has log-probs of 0 and no gradient."""
        batch = rows_of((1, 1, 1), seed=9)
        found = lab.play([look(batch, "log_probs"), learn(batch), learn(rows_of((6, 1), seed=9)), step])
        measured.equal("largest log-prob", float(found.seen[0]["log_probs"].abs().max()), 0.0)
        alone = lab.play([learn(rows_of((6, 1), seed=9)), step])
        lab.holds(measured, [found_last(found)], found_last(alone))

    @requirement("length.budget", since=(2, 0))
    def test_length_budget(self, lab: TrainLab, measured: Measured) -> None:
        """No pass exceeds its limit of tokens or rows; a longer row runs alone."""
        batch = with_own_fields(rows_of((90, 30, 100, 257, 10, 61, 80, 5), seed=10))
        limits: list[dict[str, Any]] = [{"tokens": BUDGET}, {"rows": 3}]
        for limit in limits:
            found = lab.play([learn(batch, Inspecting(**limit))], **limit).results[0]
            for name in ("passes over their limit", "fields that are not their row's"):
                measured.equal(f"{name}, {limit}", found.sums[name], 0.0)
            measured.equal(f"rows, {limit}", found.sums["rows"], batch.num_rows)
        if Capability.PACKING in lab.spec.capabilities:
            passes, longest = lab.run(tokens_of_passes, lab.case(tokens=BUDGET), batch), int(batch.lengths.max())
            measured.at_most("most tokens in a pass without gradient", max(passes), max(BUDGET * PADDING, longest))
            wide = sum(tokens > BUDGET * PADDING for tokens in passes)
            measured.at_most("passes of a longer row", wide, 1)

    def _trained(self, lab: TrainLab, measured: Measured, head: Head, objective: Weighted) -> None:
        batch = rows_of(LONG, seed=11, masked=True, temperature=0.6)
        case = lab.case(head=head, objective=objective, steps=[[batch]], probe=(batch, objective.outputs), tokens=400)
        lab.holds_to_plain(measured, [lab.run(drive, case)], case)


def groups_batch() -> Batch:
    """Rows of four prompts of 1, 8, 20 and 40 tokens: two equal ones, one that ends differently, and a longer one."""
    plain = rows_of([n + more for n in (1, 8, 20, 40) for more in (3, 3, 3, 5)], seed=14)
    rows = [ids.clone() for ids in torch.split(plain["input_ids"], plain.lengths.tolist())]
    for at in range(0, len(rows), 4):
        first = rows[at]
        rows[at + 1], rows[at + 2] = first.clone(), torch.cat([first[:-1], (first[-1:] + 1) % 128])
        rows[at + 3] = torch.cat([first, rows[at + 3][-2:]])
    return plain.with_tokens(input_ids=torch.cat(rows))


def found_last(found: Any) -> Any:
    """Results of the last of several calls."""
    found.results = found.results[-1:]
    return found


def tokens_of_passes(seat: Seat, case: Case, batch: Batch) -> list[int]:
    """Tokens in the input of the first `nn.Linear`, for each pass without gradient; empty if there is none."""
    engine = seat.start(case.spec)
    seen: list[tuple[int, int]] = []

    def look_at(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Linear) and isinstance(inputs[0], torch.Tensor):
            seen.append((id(module), inputs[0].numel() // inputs[0].shape[-1]))

    hook = register_module_forward_pre_hook(look_at)
    try:
        engine.forward(batch, ("log_probs",))
        return [tokens for module, tokens in seen if module == seen[0][0]] or [0]
    finally:
        hook.remove()
        engine.close()
