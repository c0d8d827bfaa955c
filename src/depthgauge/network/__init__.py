"""The networks that are gauged: the model, random draws of it, and its file format."""
