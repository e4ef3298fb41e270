"""What a landing has to run: which suites in full, which broken engines, by what changed since the commit before it."""
