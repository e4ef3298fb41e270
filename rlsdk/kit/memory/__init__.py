"""Memory of an engine: its parts, offloading them, and estimates without a device."""
