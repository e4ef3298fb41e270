"""Requirements for train engines, a module for each thing that is asked."""
