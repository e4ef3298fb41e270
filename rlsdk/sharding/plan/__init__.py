"""The reshard planner: from layouts to transfers, by arithmetic on boxes, with a cache. Reads no weights."""
