"""Engines that are broken only where two events of a life come together, and what must see them."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_LIVES = {"abort-in-a-pause-keeps-keys": Defect("lives:AbortInAPauseKeepsKeys", {"life": "log-prob"})}
TRAIN_LIVES = {
    "reset-behind-a-load": Defect("lives:ResetBehindALoad", {"life": "largest difference of loss, life"}),
    "head-of-before": Defect("lives:HeadOfBefore", {"life.heads": "largest difference of loss, life"}),
}
RANKS_LIVES = {"idle-rank-drops": Defect("ranks_unseen:IdleRankDrops", {"life.ranks": "largest difference"})}
