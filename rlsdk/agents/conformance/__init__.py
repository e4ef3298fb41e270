"""The conformance kit of environments: twenty requirements, checked without a model and without a GPU."""
