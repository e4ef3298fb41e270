"""Sharding managers of the third trial."""

from __future__ import annotations

from rlsdk.sharding import GenericShardingManager


class FailedSyncCounts(GenericShardingManager):
    """A failed sync counts as the last one."""

    def pull(self, plan, version):
        try:
            return super().pull(plan, version)
        except BaseException:
            self._last = (version, {k: v for values in self._fingerprints() for k, v in values.items()})
            raise


class FalseIsNone(GenericShardingManager):
    """Expect_change=False is taken for None."""

    def sync_weights(self, plan, version, *, expect_change=None):
        return super().sync_weights(plan, version, expect_change=expect_change or None)


class AnyTransport(GenericShardingManager):
    """The list of transports is ignored."""

    def __init__(self, train, rollout, *, timeout_s=600.0, bucket_bytes=64 << 20, transports=None):
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self.transports = None if transports is None else tuple(transports)
