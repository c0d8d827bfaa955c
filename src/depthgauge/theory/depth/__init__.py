"""`collapse` to fewer layers, and the effective depth of a network."""
