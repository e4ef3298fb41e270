"""Commands about plugins: what is installed, the conformance suite, a new distribution from a template."""
