"""Train many small attention models at once under a weight bound, and prove how their output depends on depth."""
