"""What the steps of a run do: stages, the loop around them, and the exported model."""
