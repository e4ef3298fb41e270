"""The journal: every event and sample of a run as lines in files, written and read."""
