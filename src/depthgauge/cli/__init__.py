"""The command `depthgauge`: one file per subcommand, which parses, calls a workflow and prints a record."""
