"""Requirements for sharding managers, a module for each thing that is asked."""
