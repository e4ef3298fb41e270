"""Models of transformers: building and loading them, batches that fit, and passes over packed rows."""
