"""Training under a weight bound: generated tasks, batched training, and the bound on the output of a trained model."""
