"""The training monitor and the trained-depth experiment."""
