"""Does a model fit, on how many devices, how fast, and on which mesh: from the specs and graphs that compile."""
