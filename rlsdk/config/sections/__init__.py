"""The typed models of a configuration, one per section, with the checks between fields of one section."""
