"""The grader of programs: runs the tests of the data row in confined processes."""
