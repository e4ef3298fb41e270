"""Teachers outside of a train engine: rollout engines of the run, and services, which say how probable rows are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from rlsdk.config import TeacherConfig
from rlsdk.config.sections.rewards import RemoteRewardConfig
from rlsdk.interfaces import Batch, ConfigError, GenerationRequest, PromptLogProbs, RlsdkError, SamplingParams, nearest
from rlsdk.interfaces.settings import RequestSettings, shared
from rlsdk.rewards.services.http_client import HttpClient, RemoteError, RemoteOptions, check_url, shown
from rlsdk.rollouts import GenerationClient, Replica
from rlsdk.trainer.inputs.rewards import secret_headers

ROUNDING = 1e-3
"""By how much a log-prob may be above 0."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""The least that can be sampled behind a row; it is not read."""


class PromptScorer(Protocol):
    """Says how probable the tokens of rows are, at temperature 1."""

    async def score(self, rows: Sequence[Sequence[int]], count: int) -> Sequence[PromptLogProbs]:
        """Of each row; with the `count` most probable tokens at each place.

        Raises:
            RlsdkError: a replica or a service failed.
        """
        ...


class EngineScorer:
    """A rollout engine of the run, with its own weights."""

    def __init__(self, role: str, replicas: Sequence[Replica], *, progress_s: float) -> None:
        """`progress_s`: see `GenerationClient`."""
        self._role, self._replicas, self._progress_s = role, replicas, progress_s

    async def score(self, rows: Sequence[Sequence[int]], count: int) -> Sequence[PromptLogProbs]:
        client = GenerationClient(self._replicas, progress_s=self._progress_s)
        running = asyncio.get_running_loop().create_task(client.run())
        try:
            return await asyncio.gather(*(self._one(client, at, row, count) for at, row in enumerate(rows)))
        finally:
            client.abort_all()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _one(self, client: GenerationClient, at: int, row: Sequence[int], count: int) -> PromptLogProbs:
        request = GenerationRequest(
            request_id=f"{self._role}#{at}", prompt_ids=tuple(row), sampling=ONE_TOKEN, prompt_log_probs=count
        )
        found = (await client.generate(request)[0]).prompt_log_probs
        if found is None or len(found.log_probs) != len(row) - 1:
            raise RlsdkError(
                f"{self._role}: its engine gave no log-prob for each of the {len(row) - 1} tokens of a row"
            )
        return found


class _Choice(BaseModel):
    class Echoed(BaseModel):
        model_config = ConfigDict(extra="ignore")
        token_logprobs: list[float | None] = []

    class Likely(BaseModel):
        model_config = ConfigDict(extra="ignore")
        logprob: float

    model_config = ConfigDict(extra="ignore")
    logprobs: Echoed | None = None
    prompt_logprobs: list[dict[int, Likely] | None] | None = None


class _Reply(BaseModel):
    """The fields of a completion that are used; servers send more."""

    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice]


class _Models(BaseModel):
    class Model(BaseModel):
        id: str

    data: list[Model]


class ServiceScorer:
    """A service with the OpenAI completions API that says how probable a prompt is: by `prompt_logprobs`, by token id
    (vLLM), or by `echo` with `logprobs`, in order (SGLang and others), which has no ids of other tokens."""

    def __init__(self, url: str, model: str, options: RemoteOptions) -> None:
        """
        Args:
            url: base URL, up to and including `/v1`.
            model: name of the model there.
            options: settings of requests.

        Raises:
            ConfigError: the URL cannot be used (`check_url`).
        """
        self.name, self._model, self._options = check_url(url).rstrip("/"), model, options

    @classmethod
    def of(cls, teacher: TeacherConfig) -> ServiceScorer:
        """Of a teacher with a URL."""
        assert teacher.url is not None
        asked = teacher.remote or RemoteRewardConfig()
        headers = secret_headers(asked.token_env, asked.headers_from_env)
        return cls(teacher.url, teacher.model or "", RemoteOptions(**shared(asked, RequestSettings), headers=headers))

    async def check(self, row: Sequence[int], count: int) -> None:
        """Asks for the models, and once for log-probs.

        Raises:
            RlsdkError: it does not have the model, or gives no log-probs of prompts.
        """
        http, url = HttpClient(self._options), f"{self.name}/models"
        try:
            data = await http.get(url)
            models = [model.id for model in _Models.model_validate_json(data).data]
        except (RemoteError, ValidationError) as error:
            raise RlsdkError(f"{url} did not answer with a list of models: {error}") from error
        finally:
            await http.close()
        if self._model not in models:
            raise RlsdkError(
                f"{self.name} has no model {self._model!r}{nearest(self._model, models)}; it has {models[:8]}"
            )
        await self.score([row], count)

    async def score(self, rows: Sequence[Sequence[int]], count: int) -> Sequence[PromptLogProbs]:
        http, room = HttpClient(self._options), asyncio.Semaphore(self._options.max_concurrent)

        async def one(row: Sequence[int]) -> PromptLogProbs:
            async with room:
                return await self._one(http, row, count)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(row)) for row in rows]
        except* RlsdkError as errors:
            raise errors.exceptions[0] from None
        finally:
            await http.close()
        return [task.result() for task in tasks]

    async def _one(self, http: HttpClient, row: Sequence[int], count: int) -> PromptLogProbs:
        url = f"{self.name}/completions"
        body = {
            **{"model": self._model, "prompt": list(row), "max_tokens": 1, "temperature": 1.0},
            **{"echo": True, "logprobs": 1, "prompt_logprobs": count},
        }
        try:
            data = await http.post(url, json.dumps(body).encode())
            choice = _Reply.model_validate_json(data).choices[0]
        except RemoteError as error:
            raise RlsdkError(f"teacher: {error}") from error
        except (ValidationError, IndexError) as error:
            raise RlsdkError(f"teacher: {url} did not answer with a completion: {shown(data)}") from error
        return self._read(choice, row, count)

    def _read(self, choice: _Choice, row: Sequence[int], count: int) -> PromptLogProbs:
        """What a choice says of a row, checked."""
        at = f"teacher: {self.name}"
        found = choice.prompt_logprobs
        if found is not None and len(found) == len(row):
            places = [{} if one is None else {token: each.logprob for token, each in one.items()} for one in found[1:]]
            strange = [at for at, (token, one) in enumerate(zip(row[1:], places, strict=True), 1) if token not in one]
            if strange:
                raise RlsdkError(
                    f"{at} answers for other tokens: none of its log-probs at {strange[0]} is of {row[strange[0]]}"
                )
            chosen = [one[token] for token, one in zip(row[1:], places, strict=True)]
            best = [sorted(one.items(), key=lambda each: (-each[1], each[0]))[:count] for one in places]
            if any(len(one) < count for one in best):
                raise RlsdkError(
                    f"{at} gives fewer than {count} tokens of a place (vLLM: start it with --max-logprobs {count})"
                )
            ids = [[token for token, _ in one] for one in best]
            return self._checked(chosen, ids, [[value for _, value in one] for one in best], count)
        echoed = None if choice.logprobs is None else choice.logprobs.token_logprobs[1 : len(row)]
        if echoed is None or len(echoed) != len(row) - 1 or None in echoed:
            raise RlsdkError(
                f"{at} gives no log-probs of prompts: neither `prompt_logprobs`, as vLLM does, nor `logprobs` with "
                "`echo`, as SGLang does"
            )
        if count:
            raise RlsdkError(
                f"{at} gives no ids of the most probable tokens (`prompt_logprobs`, as vLLM does): use "
                "algorithm.distillation.objective 'sampled', or serve the teacher by vLLM"
            )
        return self._checked(echoed, [[]] * len(echoed), [[]] * len(echoed), 0)

    def _checked(self, chosen: Sequence[Any], ids: Any, top: Any, count: int) -> PromptLogProbs:
        values = np.array(chosen, np.float32)
        best: NDArray[np.float32] = np.array(top, np.float32).reshape(len(values), count)
        if any(bool((~np.isfinite(one) | (one > ROUNDING)).any()) for one in (values, best)):
            raise RlsdkError(
                f"teacher: {self.name} answers with numbers that are no log-probs: above 0, or not finite (vLLM: start "
                "it with --logprobs-mode raw_logprobs)"
            )
        return PromptLogProbs(
            log_probs=values, top_ids=np.array(ids, np.int64).reshape(len(values), count), top_log_probs=best
        )


def prompt_outputs(scorer: PromptScorer, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """`log_probs`, `top_ids`, `top_log_probs` of a batch, as a train engine computes them at temperature 1: 0 at the
    first token of each row, and off the mask.

    Raises:
        ConfigError: another temperature, or another output.
        RlsdkError: the scorer failed.
    """
    if batch.temperature != 1.0:
        raise ConfigError(
            f"a teacher outside of a train engine gives log-probs at temperature 1, not {batch.temperature}"
        )
    if odd := sorted(set(names) - {"log_probs", "top_ids", "top_log_probs"}):
        raise ConfigError(f"a teacher outside of a train engine gives log-probs, not {odd}")
    count = int(batch.meta.get("top_k", 0)) if "top_ids" in names or "top_log_probs" in names else 0
    rows = [ids.tolist() for ids in torch.split(batch["input_ids"], batch.lengths.tolist())]
    found = run_apart(scorer.score(rows, count))
    mask = batch.tokens.get("response_mask")
    outputs = {}
    for name in names:
        parts = [torch.from_numpy(getattr(one, name)) for one in found]
        values = torch.cat([torch.cat([part.new_zeros(1, *part.shape[1:]), part]) for part in parts])
        outputs[name] = values if mask is None else values * mask.view(-1, *[1] * (values.dim() - 1))
    return outputs


def run_apart(work: Any) -> Any:
    """The result of a coroutine, on an event loop of its own: this thread may have one that runs, as in a notebook."""
    with ThreadPoolExecutor(1, thread_name_prefix="rlsdk-teacher") as executor:
        return executor.submit(asyncio.run, work).result()
