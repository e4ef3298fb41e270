"""Both ends of a sync: what sources export, what targets fetch and forward, and how it is verified."""
