"""The running rows: their tokens, which of them still run, and the decoding of the next token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import FinishReason, RlsdkError, VersionRun
from rlsdk.kit.generation.sampling import RowSampling, draw, uniforms
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.reference.jobs import ROW, Job, Prefilled, new_rows
from rlsdk.reference.lockstep import Rows

PREFILL_TOKENS = 1 << 14
"""Most tokens in one prefill pass, padding included; a longer prompt gets a pass of its own."""
PADDED_TOKENS, PADDING = 512, 1.2
"""A pass of more tokens takes no text that brings it to more than `PADDING` times its real tokens."""
RUN_COLUMNS = ("job", "index", "version", "since", "made")
"""Which sample, and its newest run of tokens of one version."""
FULL = 0.85
"""Rows are compacted when less than this share of them still runs."""


def joins(count: int, real: int, longest: int) -> bool:
    """Whether a pass takes so many texts of `real` tokens in all, padded to the `longest`."""
    padded = longest * count
    return padded <= PREFILL_TOKENS and (padded <= PADDED_TOKENS or padded <= PADDING * real)


class Running:
    """What can be counted is counted on the host (`table`): nothing is asked back from a GPU but which rows stop."""

    def __init__(self, memory: Rows, device: torch.device, jobs: dict[int, Job], stop_text: StopText) -> None:
        self.memory, self.device, self.jobs, self.stop_text = memory, device, jobs, stop_text
        self.num_drawn = 0
        """Number of sampled tokens over all rows so far."""
        self.clear()

    def clear(self) -> None:
        """Drops all rows and frees their memory."""
        self.memory.clear()
        self.table: NDArray[np.void] = np.empty(0, ROW)
        self.num_alive = 0
        self.sampling = RowSampling.of([], self.device)
        self.newest = torch.empty(0, dtype=torch.int64, device=self.device)
        self.tokens = torch.empty(0, 0, dtype=torch.int64, device=self.device)
        self.log_probs = torch.empty(0, 0, device=self.device)

    def add(self, prompts: Prefilled, counts: Sequence[int], *, capacity: int, version: int) -> None:
        """Makes rows of the next `counts` samples of each prompt, and draws their first tokens."""
        self.compact()
        first = len(self.table)
        self.table = np.concatenate([self.table, new_rows(prompts.jobs, counts, version)])
        self.num_alive += len(self.table) - first
        self._widen(capacity)
        owner = self._index(np.repeat(np.arange(len(counts)), counts))
        self.memory.add(prompts.states, owner, capacity=capacity, most=self._longest())
        self.sampling = self._sampling_of(self.table)
        self._take(prompts.logits[owner], first, version)

    def advance(self, version: int) -> None:
        """Decodes one token for every row."""
        if self.num_alive < FULL * len(self.table):
            self.compact()
        positions = self.table["given"] + self.table["made"] - 1
        # A row that is done writes where it cannot matter, and keeps rows of equal prompts in step.
        positions[~self.table["alive"]] = positions[self.table["alive"]].max()
        self._take(self.memory.step(self.newest, positions, most=self._longest()), 0, version)

    def compact(self) -> None:
        """Moves rows that still run into the places of those that are done."""
        if self.num_alive == len(self.table):
            return
        alive, order = self.table["alive"], np.arange(self.num_alive)
        order[~alive[: self.num_alive]] = np.flatnonzero(alive[self.num_alive :]) + self.num_alive
        self.table, at = self.table[order], self._index(order)
        self.tokens[: len(at)], self.log_probs[: len(at)] = self.tokens[at], self.log_probs[at]
        self.newest, self.sampling = self.newest[at], self.sampling.select(at)
        self.memory.keep(at)

    def recompute(self) -> None:
        """Recomputes the KV cache with the model's current weights."""
        self.compact()
        self.memory.clear()
        tokens, made = self.tokens.tolist(), self.table["made"].tolist()
        # The newest token is not part of it: its turn comes with the next step.
        texts = [torch.tensor([*self._job(row).text, *tokens[row][: made[row] - 1]]) for row in range(len(self.table))]
        # Rows of several steps, as where samples continue under new weights, differ much in length.
        order = np.argsort([len(text) for text in texts], kind="stable")
        waiting = deque(texts[row] for row in order)
        while waiting:
            part: list[Tensor] = []
            real = 0
            while waiting:
                real, longest = real + len(waiting[0]), len(waiting[0])
                if part and not self.memory.lockstep and not joins(len(part) + 1, real, longest):
                    break
                part.append(waiting.popleft())
            _, states = self.memory.prefill(part)
            owner = self._index(np.arange(len(part)))
            self.memory.add(states, owner, capacity=len(self.tokens), most=self._longest())
        self.memory.keep(self._index(np.argsort(order)))

    def abort(self) -> None:
        """Ends the rows of aborted jobs."""
        running = np.flatnonzero(self.table["alive"])
        hit = np.array([self._job(row).aborted for row in running], np.bool_)
        self._finish(running[hit], [FinishReason.ABORT] * int(hit.sum()))

    def _take(self, logits: Tensor, first: int, version: int) -> None:
        """Draws a token for each row from `first` on, and ends the rows that are done with it."""
        rows, sampling = self.table[first:], self.sampling
        at = torch.arange(first, len(self.table), device=self.device)
        if first:
            sampling = sampling.select(at)
        drawn, log_probs = draw(logits, sampling, uniforms(rows["key"], rows["prior"] + rows["made"], logits.shape[1]))
        slot = self._index(np.minimum(rows["made"], self.tokens.shape[1] - 1))
        self.tokens[at, slot], self.log_probs[at, slot] = drawn, log_probs
        self.newest = torch.cat([self.newest[:first], drawn])
        alive = rows["alive"]
        self._begin_runs(rows, version)
        rows["made"] += alive
        self.num_drawn += int(alive.sum())
        stopped = (drawn[:, None] == sampling.stops).any(1).cpu().numpy() | self._text_stops(first)
        done = np.flatnonzero(alive & (stopped | (rows["made"] >= rows["limit"])))
        self._finish(first + done, [FinishReason.STOP if stop else FinishReason.LENGTH for stop in stopped[done]])

    def _begin_runs(self, rows: NDArray[np.void], version: int) -> None:
        """Notes the tokens of other versions, where the next one is of this."""
        for row in np.flatnonzero(rows["alive"] & (rows["version"] != version)):
            name, index, old, since, made = (rows[column][row].item() for column in RUN_COLUMNS)
            self.jobs[name].runs.setdefault(index, []).append(VersionRun(old, made - since))
            rows["version"][row], rows["since"][row] = version, made

    def _text_stops(self, first: int) -> NDArray[np.bool_]:
        """Which rows from `first` on have just completed a stop string."""
        rows = self.table[first:]
        stops = np.zeros(len(rows), np.bool_)
        wanted = np.flatnonzero(rows["text"] & rows["alive"])
        if len(wanted):
            for row, ids in zip(wanted, self.tokens[self._index(first + wanted)].cpu().numpy(), strict=True):
                request, made = self._job(first + row).request, int(rows["made"][row])
                stops[row] = self.stop_text.ended(request.sampling.stop_strings, ids[:made], request.response_ids)
        return stops

    def _finish(self, done: NDArray[np.int64], reasons: Sequence[FinishReason]) -> None:
        """Delivers the samples of these rows.

        Raises:
            RlsdkError: a log-prob is not finite.
        """
        if not len(done):
            return
        at = self._index(done)
        tokens, log_probs = self.tokens[at].cpu().numpy(), self.log_probs[at].cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise RlsdkError(
                "the model gives logits that are not finite, with the weights of version "
                f"{self.table['version'].max()}: training has diverged, or the weights are damaged"
            )
        self.table["alive"][done] = False
        self.num_alive -= len(done)
        columns = (self.table[name][done].tolist() for name in RUN_COLUMNS)
        for name, index, version, since, made, reason, ids, logs in zip(
            *columns, reasons, tokens, log_probs, strict=True
        ):
            job = self.jobs[name]
            job.finish(index, ids[:made], logs[:made], reason, VersionRun(version, made - since))
            if not job.left:
                del self.jobs[name]

    def _widen(self, capacity: int) -> None:
        """Makes room for as many rows, and for all the tokens that they may get."""
        rows, width = max(capacity, self.tokens.shape[0]), max(int(self.table["limit"].max()), self.tokens.shape[1])
        if (rows, width) != tuple(self.tokens.shape):
            for name in ("tokens", "log_probs"):
                old: Tensor = getattr(self, name)
                new = old.new_zeros(rows, width)
                new[: old.shape[0], : old.shape[1]] = old
                setattr(self, name, new)

    def _longest(self) -> int:
        """Tokens that the longest row may get."""
        return int((self.table["given"] + self.table["limit"])[self.table["alive"]].max())

    def _sampling_of(self, rows: NDArray[np.void]) -> RowSampling:
        names, job_of_row = np.unique(rows["job"], return_inverse=True)
        params = [self.jobs[name].request.sampling for name in names.tolist()]
        return RowSampling.of(params, self.device).select(self._index(job_of_row))

    def _job(self, row: int | np.int64) -> Job:
        return self.jobs[int(self.table["job"][row])]

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device)
