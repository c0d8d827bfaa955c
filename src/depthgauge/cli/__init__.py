"""The command `depthgauge`: one file a subcommand, no logic."""
