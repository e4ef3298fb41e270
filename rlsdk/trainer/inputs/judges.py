"""Judges that are engines of the run: rollout engines with their own weights that assess responses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlsdk.config import JudgeEngineConfig, ModelConfig
from rlsdk.data import DataRow, Prompt, PromptDataset, PromptFormat
from rlsdk.interfaces import (
    ConfigError,
    DataError,
    FinishReason,
    GenerationRequest,
    RewardSample,
    RlsdkError,
    SamplingParams,
)
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.rewards.services.http_client import RemoteError
from rlsdk.rewards.services.judge import JudgeOptions, VerdictError, question, verdict
from rlsdk.rewards.services.messages import SentScore
from rlsdk.rollouts import GenerationClient, Replica
from rlsdk.rollouts.groups.rollouter import without_stop
from rlsdk.trainer.inputs.codec import TokenCodec
from rlsdk.trainer.inputs.tokenizer import answer_ends

_TEXT, _PLACE = "question", "place"
"""Fields of the rows that hold a question and its index."""


class EngineJudge:
    """Queries the replicas of one role; satisfies `rlsdk.rewards.services.remote.Client`. Queries made before `connect`
    wait for it."""

    def __init__(self, role: str, judge: JudgeOptions, asked: JudgeEngineConfig, policy: ModelConfig) -> None:
        """Loads the tokenizer.

        Args:
            role: name of the engine's role.
            judge: the question template and how its verdict is read.
            asked: configuration of the judge engine.
            policy: the policy's configuration: its `trust_remote_code` also applies to the judge's model.

        Raises:
            ConfigError: there is no room for a question, no chat template for the system prompt, or no tokenizer.
        """
        self.name = role
        self._judge = judge
        self._room = asked.max_model_tokens - judge.max_tokens
        if self._room < 1:
            raise ConfigError(
                f"judge.max_tokens {judge.max_tokens}: expected less than judge.engine.max_model_tokens "
                f"{asked.max_model_tokens}, because the question needs room"
            )
        self._tokenizer: Any = load_tokenizer(
            asked.path, revision=asked.revision, trust_remote_code=policy.trust_remote_code
        )
        self._codec = TokenCodec(self._tokenizer)
        self._form = PromptFormat(prompt_field=_TEXT, system_prompt=judge.system_prompt)
        self._form.uses_chat_template(self._tokenizer)
        self._sampling = SamplingParams(
            max_tokens=judge.max_tokens,
            temperature=judge.temperature,
            seed=judge.seed,
            stop_token_ids=tuple(answer_ends(self._tokenizer, self._form, asked.path, revision=asked.revision).stops),
        )
        self._numbers = itertools.count()
        self._replicas: Future[tuple[Sequence[Replica], float]] = Future()
        self._client: GenerationClient | None = None
        self._running: asyncio.Task[None] | None = None

    def connect(self, replicas: Sequence[Replica], *, progress_s: float) -> None:
        """Sets the replicas that answer. Call once, from any thread. `progress_s`: see `GenerationClient`."""
        self._replicas.set_result((replicas, progress_s))

    async def score(self, samples: Sequence[RewardSample]) -> Sequence[SentScore]:
        """As `Client.score`; every sample is judged on its own."""
        questions: dict[int, str] = {}
        results: dict[int, SentScore] = {}
        for at, sample in enumerate(samples):
            try:
                questions[at] = question(sample, self._judge)
            except VerdictError as error:
                results[at] = SentScore(error=str(error))
        prompts = await asyncio.to_thread(self._encode, questions)
        for at in questions.keys() - prompts.keys():
            results[at] = SentScore(error=f"the question has more than {self._room} tokens, for which there is room")
        try:
            verdicts = await asyncio.gather(*(self._one(prompt) for prompt in prompts.values()))
        except RlsdkError as error:
            raise RemoteError(f"{self.name}: {error}") from error
        results |= dict(zip(prompts, verdicts, strict=True))
        return [results[at] for at in range(len(samples))]

    async def check(self) -> None:
        """Does nothing: an engine of the run reports its own errors."""

    async def close(self) -> None:
        """Cancels the queries in progress."""
        self._replicas.cancel()
        if self._client is not None and self._running is not None:
            self._client.abort_all()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _encode(self, questions: Mapping[int, str]) -> dict[int, Prompt]:
        """Prompts of the questions that fit into the context. Special tokens in a question are text: a response cannot
        end the judge's turn."""
        rows = [DataRow(row={_TEXT: text, _PLACE: at}, source=f"question {at}") for at, text in questions.items()]
        if not rows:
            return {}
        try:
            made = PromptDataset(rows, self._tokenizer, self._form, max_prompt_tokens=self._room, name=self.name)
        except DataError:  # All questions were too long.
            return {}
        return {questions_at(prompt): prompt for prompt in made}

    async def _one(self, prompt: Prompt) -> SentScore:
        client = await self._connected()
        request = GenerationRequest(
            request_id=f"{self.name}#{next(self._numbers)}", prompt_ids=prompt.prompt_ids, sampling=self._sampling
        )
        output = await client.generate(request)[0]
        reply = self._codec.decode(without_stop(output.token_ids, self._sampling.stop_token_ids))
        try:
            is_cut = output.finish_reason is FinishReason.LENGTH
            return SentScore(score=verdict(reply, self._judge, is_cut=is_cut))
        except VerdictError as error:
            return SentScore(error=str(error))

    async def _connected(self) -> GenerationClient:
        replicas, progress_s = await asyncio.shield(asyncio.wrap_future(self._replicas))
        if self._client is None:
            self._client = GenerationClient(replicas, progress_s=progress_s)
            self._running = asyncio.get_running_loop().create_task(self._client.run())
        return self._client


def questions_at(prompt: Prompt) -> int:
    """Index of the question from which a prompt was made."""
    place = prompt.row[_PLACE]
    assert isinstance(place, int)
    return place
