"""Load the weights of a checkpoint, or leave them on the disk."""
