"""Which devices a run takes, whether a cluster has them, and the position of each rank on them: pure, without Ray."""
