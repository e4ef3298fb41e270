"""A taskset: lower-case letters are to be written; the last message is scored."""

import verifiers.v1 as vf

__all__ = ["Letters"]


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def lower(self, trace: vf.Trace) -> float:
        return sum(map(str.islower, trace.last_reply)) / 20

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    count: int = 6


class Letters(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for name in "ABCDEFGHIJKL"[: self.config.count]:
            yield LettersTask(vf.TaskData(prompt=f"{name}{name}:"), self.config.task)
