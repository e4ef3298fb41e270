"""Rollout engines of the fifth trial, and others of their families."""

from __future__ import annotations

import tempfile
from pathlib import Path

from broken.rollout_unseen import Patched
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
