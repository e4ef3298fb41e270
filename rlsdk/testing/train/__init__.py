"""The harness of the suite for train engines: cases, sequences of calls, and a reference engine in plain torch."""
