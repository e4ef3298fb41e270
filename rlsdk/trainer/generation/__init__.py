"""Groups for the learner: their source, its schedule's driver, publishing of weights, and what a journal gave."""
