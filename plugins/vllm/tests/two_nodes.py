"""A replica of vLLM whose two workers are on two nodes, without a GPU: prints what came of two updates as JSON.

`python two_nodes.py MODEL FOLDER [EP]`. Two raylets of this machine are the nodes, each with one GPU that Ray takes on
trust. vLLM's own executor starts its Ray workers in the bundles of the replica; they compute on CPUs, by a platform
that is vLLM's CPU platform but for what it says of Ray (`FOLDER` holds it, found by vLLM as any platform plugin).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

PLATFORM = '''
from vllm.platforms.cpu import CpuPlatform


class SpreadCpu(CpuPlatform):
    """Offers its workers to Ray in the place of GPUs."""

    ray_device_key = "GPU"

    @classmethod
    def check_and_update_config(cls, vllm_config):
        parallel = vllm_config.parallel_config
        before = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        parallel.distributed_executor_backend = before


def register():
    return "spread_cpu.SpreadCpu"
'''
METADATA = "Metadata-Version: 2.1\nName: spread-cpu\nVersion: 1.0\n"
ENTRY = "[vllm.platform_plugins]\nspread_cpu = spread_cpu:register\n"


def write_platform(folder: Path) -> None:
    """The platform, as a package that is installed in `folder`."""
    described = folder / "spread_cpu-1.0.dist-info"
    described.mkdir(parents=True)
    (folder / "spread_cpu.py").write_text(PLATFORM)
    (described / "METADATA").write_text(METADATA)
    (described / "entry_points.txt").write_text(ENTRY)


class Replica:
    """The replica's process, on the first node; the sources are in it as well, as ranks of that node."""

    def outcome(self, model: str, ep_size: int) -> dict[str, Any]:
        import torch

        from rlsdk.interfaces import ModelSpec, RankContext, RolloutSpec
        from rlsdk.testing.rollout.plain_model import PlainModel
        from rlsdk.testing.rollout.worker_updates import TWO_NODES
        from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost
        from rlsdk_vllm import in_process
        from rlsdk_vllm.config import VllmOptions
        from rlsdk_vllm.engine import VllmRolloutEngine

        torch.set_num_threads(1)
        if ep_size > 1:  # Refused on a CPU, where vLLM ends in a segmentation fault when it samples.
            in_process.check_split = lambda *_: None
        engine = VllmRolloutEngine()
        engine.initialize(
            RankContext(role="rollout", node="near", bundles=(0, 1), device_nodes=("near", "far"), timeout_s=120.0),
            RolloutSpec(
                model=ModelSpec(path=model, dtype="float32"),
                tp_size=2,
                ep_size=ep_size,
                max_model_tokens=64,
                max_running=4,
                load_weights=False,
                options=VllmOptions(kv_cache_mb=16),
            ),
        )
        plain, rollout = PlainModel.load(Path(model)), LocalGroup([RolloutHost(engine)])
        try:
            return {
                "nodes": self.nodes_of_workers(engine),
                "layouts": [[x.node, x.is_apart, x.worker] for x in engine.layout()],
                "ways": [
                    self.sync(ways, at, plain, engine, rollout, ep_size == 1)
                    for at, ways in enumerate(TWO_NODES, start=1)
                ],
            }
        finally:
            rollout.hosts[0].target.close()
            engine.close()

    def nodes_of_workers(self, engine: Any) -> list[str]:
        """Ray's own word on where each worker is."""
        executor = engine.engine._engine.model_executor
        return [handle.node_id for handle in executor.ray_worker_handles]

    def sync(self, ways: tuple[str, str], version: int, plain: Any, engine: Any, rollout: Any, samples: bool) -> Any:
        """One update by these transports, of weights that no update before had."""
        from rlsdk.testing.rollout.worker_updates import bytes_held, largest_difference, update_two_nodes

        report, train, state = update_two_nodes(plain, rollout, ways, version, "near")
        return {
            "transports": sorted(report.transports),
            "held": list(map(bytes_held, engine.layout())),
            "received": [part.num_bytes for part in report.receipts[0].workers],
            "calls": [host.calls for host in train.hosts],
            "difference": largest_difference(plain, state, engine) if samples else None,
        }


def main(model: str, folder: str, ep_size: int = 1) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    try:
        cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=bool(os.environ.get("SHOW_LOGS")))
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2, strategy="STRICT_SPREAD")
        ray.get(group.ready(), timeout=60)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        replica = ray.remote(num_cpus=0.1)(Replica).options(scheduling_strategy=strategy).remote()
        found: dict[str, Any] = ray.get(replica.outcome.remote(model, ep_size), timeout=240)
        table = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return {**found, "bundles": [table[0], table[1]]}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    here = Path(__file__).parent
    write_platform(Path(sys.argv[2]))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[2], str(here), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_PLUGINS": "spread_cpu", "TORCH_COMPILE_DISABLE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    sys.path.insert(0, sys.argv[2])
    print("OUTCOME " + json.dumps(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
