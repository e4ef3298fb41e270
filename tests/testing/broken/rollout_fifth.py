"""Rollout engines of the fifth trial, and others of their families."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from broken.rollout_unseen import Patched
from rlsdk.kit.outputs import output_logits
from rlsdk.reference.rows import PositionedRows, RowStep
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class OneRowMore(TransformersRolloutEngine):
    """One sample more than `max_running` is decoded at once."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.decoder.max_running += 1


class EndedRowsCount(Patched):
    """Rows that have ended count among decoded tokens until their places are taken."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            ended = int((~self.table["alive"][first:]).sum())
            super()._take(logits, first, version)
            self.num_drawn += ended


class TemporaryFolderStays(TransformersRolloutEngine):
    """A folder of every engine stays in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        folder = Path(tempfile.mkdtemp(prefix="kernels-"))
        (folder / "index.json").write_text("{}")


class WindowTooWide(Patched):
    """Rows that are decoded see one token more than the model's window."""

    class RowsPart(PositionedRows):
        def step(self, tokens, positions, *, most):
            highest = int(positions.max())
            self._reserve(self.count, highest + 1, most)
            at = torch.from_numpy(positions)
            self.now = WiderStep(at, highest + 1)
            hidden = self.backbone(
                input_ids=tokens[:, None], position_ids=at[:, None], past_key_values=self, use_cache=True,
                row_step=self.now,
            ).last_hidden_state  # fmt: skip
            return output_logits(self.model, hidden[:, 0])


class WiderStep(RowStep):
    """Part of it."""

    def visible(self, window, device):
        return super().visible(None if window is None else window + 1, device)


class FiltersOfTheFolder(TransformersRolloutEngine):
    """Where a request filters nothing, the model's `generation_config.json` does."""

    async def generate(self, requests):
        file = Path(self.spec.model.path) / "generation_config.json"
        fields = json.loads(file.read_text()) if file.exists() else {}
        top_k, top_p = fields.get("top_k") or 0, fields.get("top_p") or 1.0
        changed = [
            replace(one, sampling=replace(one.sampling, top_k=top_k, top_p=top_p))
            if not one.sampling.top_k and one.sampling.top_p == 1
            else one
            for one in requests
        ]
        async for output in super().generate(changed):
            yield output
