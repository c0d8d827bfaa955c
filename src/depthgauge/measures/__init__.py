"""What is measured on a trace: one quantity, one function, gathered in a Profile."""
