"""The command `depthgauge`, which parses, calls a workflow and prints a record."""
