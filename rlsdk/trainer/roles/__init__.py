"""The running roles: their placement, ranks and hosts, whose turn the devices are, and the serving replicas."""
