"""A configuration out of YAML files, recipes and flags, with the origin of each value."""
