"""Where tools run what a model wrote."""
