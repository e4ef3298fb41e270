"""What hosts put in front of an engine: it refuses calls that the engine's state does not allow."""
