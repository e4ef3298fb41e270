"""The harness of the suite for sharding managers: engines that hold tensors, layouts, groups and an oracle."""
