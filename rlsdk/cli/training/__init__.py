"""Commands that train, and those that repeat runs."""
