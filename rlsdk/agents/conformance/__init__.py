"""The conformance kit of environments: its requirements, checked without a model and without a GPU."""
