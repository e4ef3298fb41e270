"""The built-in engines and the generic sharding manager hold all that they claim."""

from __future__ import annotations

from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance


class TestTransformers(RolloutConformance):
    backend = "transformers"


class TestTorch(TrainConformance):
    backend = "torch"


class TestGenericSharding(ShardingConformance):
    backend = "*+*"
    arguments = {"bucket_bytes": 2048}  # noqa: RUF012 - as an author would write it
    bucket_bytes = 2048


del RolloutConformance, ShardingConformance, TrainConformance
