"""Weight transfer from the training layout to the inference layout: planner, transports, both ends, and the manager.

Pull model: the manager in the controller plans and checks; each rollout replica (`WeightTarget`) asks the training
ranks (`WeightSource`) for the boxes it wants, in bounded rounds. The hosts of the two roles must serve:

- train: `weight_layout()`, `weight_fingerprints(transfers)`, and, even while the engine's own thread is busy,
  `export_weights(buckets, sync)`: the methods `layout`, `fingerprints` and `export` of its `WeightSource`; if replicas
  quantize weights, `weight_block_maxima` and `weight_block_fingerprints` too
- rollout: `target_layouts()` and `pull_weights(buckets, peers, version, timeout_s, relay)`, and, during a pull,
  `pass_on_weights(buckets, sync, timeout_s)`: the methods `layouts`, `pull` and `pass_on` of its `WeightTarget`
"""

from __future__ import annotations

from rlsdk.sharding.manager import GenericShardingManager
from rlsdk.sharding.plan.cache import PlanCache, layout_hash
from rlsdk.sharding.plan.planner import lower_bound_bytes, plan_reshard
from rlsdk.sharding.transfer.source import WeightSource
from rlsdk.sharding.transfer.target import WeightTarget
from rlsdk.sharding.transports.table import TRANSPORTS

__all__ = [
    "TRANSPORTS",
    "GenericShardingManager",
    "PlanCache",
    "WeightSource",
    "WeightTarget",
    "layout_hash",
    "lower_bound_bytes",
    "plan_reshard",
]
