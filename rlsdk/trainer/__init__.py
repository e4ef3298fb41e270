"""Training: takes groups from the stream, updates the roles, and runs whole runs from preparation to result."""
