"""Cached decoding of many samples at once: prompts are run once, finished rows leave, waiting samples take their place.

Rows stand in preallocated key-value buffers, each at its own position; per step there is one pass through the model and
a handful of tensor operations over all rows, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest
from rlsdk.reference.row_cache import PrefillCache, RowCache
from rlsdk.reference.sampling import RowSampling, draw, uniforms

PREFILL_TOKENS = 1 << 14
"""Most prompt tokens in one pass."""
COMPACT_SHARE = 0.75
"""Rows are moved together when fewer than this share of them still runs."""


@dataclass(frozen=True)
class Sample:
    """One sample to make."""

    request: GenerationRequest
    index: int
    seed: int

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens


StopText = Callable[[Sample, list[int]], bool]
"""Tells from a sample and its token ids whether a stop string is complete."""


class Decoding:
    """One `generate` call under way. Not thread-safe, but for `abort`."""

    def __init__(
        self,
        backbone: nn.Module,
        head: Callable[[Tensor], Tensor],
        samples: Sequence[Sample],
        *,
        vocabulary: int,
        capacity: int,
        version: int,
        stop_text: StopText,
    ) -> None:
        self.backbone, self.head, self.version, self.stop_text = backbone, head, version, stop_text
        # Prompts of like length are run together; the last of the list is next.
        self.waiting = list(samples)
        self.waiting.sort(key=lambda sample: len(sample.request.prompt_ids))
        self.waiting.reverse()
        self.vocabulary = vocabulary
        self.device = next(backbone.parameters()).device
        self.capacity = min(capacity, len(samples))
        self.cache = RowCache(self.capacity, max(len(s.request.prompt_ids) + s.max_tokens for s in samples))
        most = max(sample.max_tokens for sample in samples)
        self.tokens = torch.zeros(self.capacity, most, dtype=torch.int64, device=self.device)
        self.log_probs = torch.zeros(self.capacity, most, device=self.device)
        self.running: list[Sample] = []
        """Rows in the buffers; a row that is done stays until rows are moved together, and is decoded along."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.prompt_lengths, self.limits, self.made, self.alive = none, none, none, none.bool()
        self.num_alive = 0
        self.sampling: RowSampling | None = None
        self._aborted: set[str] = set()
        self._abort_all = False

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """Marks requests (None: all) to be ended before the next pass. May be called from any thread."""
        if request_ids is None:
            self._abort_all = True
        else:
            self._aborted |= set(request_ids)

    def steps(self) -> Iterator[list[GenerationOutput]]:
        """Runs to the end; yields after every pass what it finished, often nothing."""
        while self.waiting or self.num_alive:
            if self._abort_all or self._aborted:
                yield self._leave_aborted()
            elif self.waiting and self.capacity - self.num_alive >= max(self.capacity // 8, 1):
                self._compact()
                yield self._admit()
            else:
                if self.num_alive < COMPACT_SHARE * len(self.running):
                    self._compact()
                yield self._step()

    def _admit(self) -> list[GenerationOutput]:
        """Runs the prompts of the next waiting samples, once each, and draws their first tokens."""
        taken, prompts = self._next_samples(self.capacity - len(self.running))
        ids = [torch.tensor(request.prompt_ids) for request in prompts.values()]
        lengths = torch.tensor([len(i) for i in ids], device=self.device)
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
        prefill = PrefillCache()
        hidden = self.backbone(input_ids=padded, past_key_values=prefill, use_cache=True).last_hidden_state
        logits = self.head(hidden[torch.arange(len(ids), device=self.device), lengths - 1])
        places = {name: at for at, name in enumerate(prompts)}
        owner = torch.tensor([places[sample.request.request_id] for sample in taken], device=self.device)
        first = len(self.running)
        self.cache.add(prefill, owner)
        self._append(taken, lengths[owner])
        return self._take(logits[owner], slice(first, len(self.running)))

    def _next_samples(self, free: int) -> tuple[list[Sample], dict[str, GenerationRequest]]:
        """As many waiting samples as there is room for, and their prompts."""
        taken: list[Sample] = []
        prompts: dict[str, GenerationRequest] = {}
        room = PREFILL_TOKENS
        while self.waiting and len(taken) < free:
            request = self.waiting[-1].request
            if request.request_id not in prompts:
                if prompts and len(request.prompt_ids) > room:
                    break
                room -= len(request.prompt_ids)
                prompts[request.request_id] = request
            taken.append(self.waiting.pop())
        return taken, prompts

    def _append(self, taken: list[Sample], prompt_lengths: Tensor) -> None:
        new = RowSampling.of([(s.request.sampling, s.seed, s.index) for s in taken], self.vocabulary, self.device)
        self.sampling = self.sampling.join(new) if self.sampling is not None and self.running else new
        self.running = self.running + taken
        self.num_alive += len(taken)
        limits = torch.tensor([sample.max_tokens for sample in taken], device=self.device)
        self.prompt_lengths = torch.cat([self.prompt_lengths, prompt_lengths])
        self.limits = torch.cat([self.limits, limits])
        self.made = torch.cat([self.made, torch.zeros_like(limits)])
        self.alive = torch.cat([self.alive, torch.ones_like(limits, dtype=torch.bool)])

    def _step(self) -> list[GenerationOutput]:
        """One token for every row."""
        rows = torch.arange(len(self.running), device=self.device)
        last = self.tokens[rows, self.made - 1]
        position = self.prompt_lengths + self.made - 1
        highest = int(position[self.alive].max())
        # A row that is done writes where it cannot matter, and keeps rows of equal prompts in step.
        position = torch.where(self.alive, position, highest)
        extra = self.cache.place(position, highest)
        hidden = self.backbone(
            input_ids=last[:, None],
            position_ids=position[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **extra,
        ).last_hidden_state
        return self._take(self.head(hidden[:, 0]), slice(0, len(rows)))

    def _take(self, logits: Tensor, rows: slice) -> list[GenerationOutput]:
        """Draws a token for these rows; returns the samples that are done with it."""
        at = torch.arange(rows.start, rows.stop, device=self.device)
        whole = self._sampling()
        sampling = whole if len(at) == len(self.running) else whole.select(at)
        made = self.made[rows]
        tokens, log_probs = draw(logits, sampling, uniforms(sampling.key, made.cpu().numpy()))
        slot = made.clamp(max=self.tokens.shape[1] - 1)
        self.tokens[at, slot] = tokens
        self.log_probs[at, slot] = log_probs
        self.made[rows] += self.alive[rows]
        stopped = (tokens[:, None] == sampling.stops).any(1)
        for row in range(rows.start, rows.stop):
            if self.running[row].request.sampling.stop_strings and self.alive[row]:
                ids = self.tokens[row, : int(self.made[row])].tolist()
                stopped[row - rows.start] |= self.stop_text(self.running[row], ids)
        done = (stopped | (self.made[rows] >= self.limits[rows])) & self.alive[rows]
        if not bool(done.any()):
            return []
        return self._finish(at[done], stopped[done].tolist())

    def _finish(self, rows: Tensor, stopped: list[bool], aborted: bool = False) -> list[GenerationOutput]:
        """Takes rows out of the race and reads them out."""
        self.alive[rows] = False
        self.num_alive -= len(rows)
        lengths = self.made[rows].tolist()
        tokens, log_probs = self.tokens[rows].cpu().numpy(), self.log_probs[rows].cpu().numpy()
        ends = {True: FinishReason.STOP, False: FinishReason.LENGTH}
        return [
            self._output(
                self.running[row],
                tokens[at, :length],
                log_probs[at, :length],
                FinishReason.ABORT if aborted else ends[stop],
            )
            for at, (row, length, stop) in enumerate(zip(rows.tolist(), lengths, stopped, strict=True))
        ]

    def _output(self, sample: Sample, tokens: Any, log_probs: Any, reason: FinishReason) -> GenerationOutput:
        return GenerationOutput(
            request_id=sample.request.request_id,
            sample_index=sample.index,
            token_ids=tokens,
            log_probs=log_probs,
            finish_reason=reason,
            policy_version=self.version,
            last_policy_version=self.version,
        )

    def _compact(self) -> None:
        """Moves the rows that still run together, and forgets the others."""
        if self.num_alive == len(self.running):
            return
        rows = self.alive.nonzero()[:, 0]
        self.cache.keep(rows)
        self.running = [self.running[row] for row in rows.tolist()]
        self.tokens[: len(rows)] = self.tokens[rows]
        self.log_probs[: len(rows)] = self.log_probs[rows]
        self.prompt_lengths, self.limits = self.prompt_lengths[rows], self.limits[rows]
        self.made, self.alive = self.made[rows], self.alive[rows]
        self.sampling = self._sampling().select(rows)

    def _leave_aborted(self) -> list[GenerationOutput]:
        every, named = self._abort_all, self._aborted
        self._abort_all, self._aborted = False, set()

        def hit(sample: Sample) -> bool:
            return every or sample.request.request_id in named

        alive = self.alive.tolist()
        rows = [row for row, sample in enumerate(self.running) if alive[row] and hit(sample)]
        unstarted = [sample for sample in self.waiting if hit(sample)]
        self.waiting = [sample for sample in self.waiting if not hit(sample)]
        at = torch.tensor(rows, dtype=torch.int64, device=self.device)
        left = self._finish(at, [False] * len(rows), aborted=True)
        nothing = (self.tokens[:0, 0].cpu().numpy(), self.log_probs[:0, 0].cpu().numpy())
        return left + [self._output(sample, *nothing, FinishReason.ABORT) for sample in unstarted]

    def _sampling(self) -> RowSampling:
        if self.sampling is None:
            raise RuntimeError("no row was admitted yet")
        return self.sampling
