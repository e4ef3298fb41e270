"""Requirements: outputs equal those of plain transformers, row by row, each at the right token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rlsdk.interfaces import Batch, Capability, Head
from rlsdk.testing.process.worlds import Seat
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.case_runner import drive
from rlsdk.testing.train.cases import Case, Weighted, train_batch
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.plain_steps import plain_model_of, plain_numbers

COLD = 1e-3
"""A temperature at which logits are hundreds apart."""
Asked = Sequence[tuple[Batch, tuple[str, ...]]]


def forward_all(seat: Seat, case: Case, asked: Asked) -> list[dict[str, Tensor]]:
    """Outputs of several batches from one engine."""
    engine = seat.start(case.spec)
    try:
        return [engine.forward(batch, names) for batch, names in asked]
    finally:
        engine.close()


def through_linear_layers(seat: Seat, case: Case, batch: Batch) -> tuple[int, Tensor]:
    """Largest number of tokens in the input of any `nn.Linear` in a pass over the batch, and the log-probs."""
    most = 0

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal most
        if isinstance(module, nn.Linear):
            most = max(most, inputs[0].numel() // inputs[0].shape[-1])

    engine = seat.start(case.spec)
    hook = register_module_forward_pre_hook(look)
    try:
        found = engine.forward(batch, ("log_probs",))["log_probs"]
        return most, found
    finally:
        hook.remove()
        engine.close()


class OutputRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("outputs.log_probs", basic=True)
    def test_outputs_log_probs(self, lab: TrainLab, measured: Measured) -> None:
        """Log-probs of every token, from logits divided by the temperature: flat, float32, 0 at the first position of a
        row."""
        self._parity(lab, measured, ("log_probs",), (1.0,))

    @requirement("outputs.temperature")
    def test_outputs_temperature(self, lab: TrainLab, measured: Measured) -> None:
        """Logits are divided by the batch's temperature before log-probs are computed."""
        self._parity(lab, measured, ("log_probs",), (0.6, 1.7))

    @requirement("outputs.entropy", needs=Capability.ENTROPY, basic=True)
    def test_outputs_entropy(self, lab: TrainLab, measured: Measured) -> None:
        """Entropy of the distribution from which each token was chosen, at the batch's temperature."""
        self._parity(lab, measured, ("entropy",), (0.6, 1.0, 1.7))

    @requirement("outputs.entropy_low_temperature", needs=Capability.ENTROPY, since=(2, 0))
    def test_outputs_entropy_low_temperature(self, lab: TrainLab, measured: Measured) -> None:
        """Entropy and its gradient are finite even if the temperature is so low that most probabilities underflow in
        float32."""
        batch = train_batch(seed=1).with_meta(temperature=COLD)
        (found,) = lab.run(forward_all, lab.case(), [(batch, ("entropy",))])
        entropy = found["entropy"]
        measured.equal("entropies that are not finite", int((~entropy.isfinite()).sum()), 0)
        measured.at_least("smallest entropy", float(entropy.min()), -lab.suite.tolerance)
        # Not compared with plain torch: this temperature also amplifies rounding differences.
        driven = lab.drive(steps=[[batch]], objective=Weighted(("entropy",)), witness=False)
        measured.equal("gradient norms that are not finite", sum(not math.isfinite(n) for n in driven.norms), 0)

    @requirement("outputs.values", needs=Capability.VALUE_HEAD, basic=True)
    def test_outputs_values(self, lab: TrainLab, measured: Measured) -> None:
        """A value at t is that of the state in which token t is chosen: the head's output at t - 1."""
        self._parity(lab, measured, ("values",), (1.0,), Head.VALUE)

    @requirement("outputs.scores", needs=Capability.SCORE_HEAD, basic=True)
    def test_outputs_scores(self, lab: TrainLab, measured: Measured) -> None:
        """A score is the head's output at a row's last token: one per row."""
        self._parity(lab, measured, ("scores",), (1.0,), Head.SCORE)

    @requirement("outputs.mask", basic=True)
    def test_outputs_mask(self, lab: TrainLab, measured: Measured) -> None:
        """With a `response_mask` outputs are 0 outside the mask and unchanged inside; rows with the same tokens may
        have different masks."""
        batch = train_batch(seed=2, masked=True)
        case = lab.case()
        found = lab.run(forward_all, case, [(batch, ("log_probs",))])[0]["log_probs"]
        expected = numbers(case, batch)["log_probs"]
        measured.equal("largest value off the mask", float(found[~batch["response_mask"]].abs().max()), 0.0)
        measured.at_most("largest difference on it", float((found - expected).abs().max()), lab.suite.tolerance)
        twins = batch.select([*range(batch.num_rows)] * 2)
        masks = torch.cat([batch["response_mask"], ~batch["response_mask"]])
        twins = twins.with_rows(row_id=torch.arange(twins.num_rows)).with_tokens(response_mask=masks)
        case = lab.case(steps=[[twins]], probe=(twins, ("log_probs",)))
        lab.holds_to_plain(measured, [lab.run(drive, case)], case, "same tokens, other masks")

    @requirement("outputs.row_order", basic=True)
    def test_outputs_row_order(self, lab: TrainLab, measured: Measured) -> None:
        """Outputs are in the order of the batch's rows, in whatever order and passes the engine runs them."""
        batch = train_batch(11, seed=3)
        order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
        mixed = batch.select(order)
        names = ("log_probs",)
        for rows in (None, 2):
            first, second = lab.run(forward_all, lab.case(rows=rows), [(batch, names), (mixed, names)])
            moved = first["log_probs"][batch.token_index(order)]
            worst = float((moved - second["log_probs"]).abs().max())
            measured.at_most(f"largest difference, passes of {rows or 'all'} rows", worst, lab.suite.tolerance)

    @requirement("outputs.batch_invariance")
    def test_outputs_batch_invariance(self, lab: TrainLab, measured: Measured) -> None:
        """A row's outputs do not depend on other rows, even much longer ones; a batch may have no rows."""
        short = train_batch(4, seed=4, longest=6)
        long = train_batch(3, seed=5, longest=90)
        both = Batch(
            lengths=torch.cat([long.lengths, short.lengths]),
            tokens={name: torch.cat([long[name], short[name]]) for name in short.tokens},
            rows={"row_id": torch.arange(7)},
        )
        nothing = replace(short, lengths=short.lengths[:0], tokens={n: t[:0] for n, t in short.tokens.items()})
        nothing = replace(nothing, rows={name: rows[:0] for name, rows in short.rows.items()})
        names = ("log_probs",)
        found = lab.run(forward_all, lab.case(), [(short, names), (both, names), (nothing, names)])
        alone, beside = found[0]["log_probs"], found[1]["log_probs"][long.num_tokens :]
        measured.at_most("largest difference", float((alone - beside).abs().max()), lab.suite.tolerance)
        expected = numbers(lab.case(), both)["log_probs"]
        measured.at_most(
            "largest difference from plain", float((found[1]["log_probs"] - expected).abs().max()), lab.suite.tolerance
        )
        measured.equal("outputs of no rows", len(found[2]["log_probs"]), 0)

    @requirement("outputs.packing", needs=Capability.PACKING, basic=True)
    def test_outputs_packing(self, lab: TrainLab, measured: Measured) -> None:
        """No padding passes through linear layers: for one row of 100 tokens and six of 3 they get 118 tokens."""
        rows = [[8 + at % 100 for at in range(length)] for length in (100, *[3] * 6)]
        batch = Batch.from_rows(rows)
        seen, found = lab.run(through_linear_layers, lab.case(), batch)
        expected = numbers(lab.case(), batch)["log_probs"]
        measured.at_most("largest difference", float((found - expected).abs().max()), lab.suite.tolerance)
        # 0 for an engine with its own linear layers, which is not inspected.
        measured.at_most("most tokens through a linear layer at once", seen, batch.num_tokens)

    def _parity(
        self,
        lab: TrainLab,
        measured: Measured,
        names: tuple[str, ...],
        temperatures: Sequence[float],
        head: Head = Head.LM,
    ) -> None:
        case = lab.case(head=head)
        batches = [train_batch(seed=1).with_meta(temperature=t) for t in temperatures]
        tokens = ending_in(train_batch(8, seed=6), range(8))
        *found, special = lab.run(forward_all, case, [(batch, names) for batch in (*batches, tokens)])
        for temperature, batch, outputs in zip(temperatures, batches, found, strict=True):
            expected = numbers(case, batch)
            for name in names:
                mine = outputs[name]
                assert (mine.dtype, mine.device.type) == (torch.float32, "cpu"), f"{name}: {mine.dtype}, {mine.device}"
                assert mine.shape == expected[name].shape, f"{name}: {list(mine.shape)}"
                at = f" at temperature {temperature}" if len(temperatures) > 1 else ""
                worst = float((mine - expected[name]).abs().max())
                measured.at_most(f"largest difference of {name}{at}", worst, lab.suite.tolerance)
        for name, wanted in numbers(case, tokens).items():
            if name in names:
                worst = float((special[name] - wanted).abs().max())
                measured.at_most(f"largest difference of {name}, special tokens at the end", worst, lab.suite.tolerance)


def ending_in(batch: Batch, tokens: Sequence[int]) -> Batch:
    """Rows that each end with two equal tokens: one row for each of the first ids of the vocabulary, which include
    padding and end tokens."""
    ids = batch["input_ids"].clone()
    for token, stop, length in zip(tokens, batch.offsets[1:].tolist(), batch.lengths.tolist(), strict=True):
        ids[stop - min(2, length) : stop] = token
    return batch.with_tokens(input_ids=ids)


def numbers(case: Case, batch: Batch) -> dict[str, Tensor]:
    """Outputs of plain transformers."""
    with torch.no_grad():
        return plain_numbers(plain_model_of(case), case.head, batch)
