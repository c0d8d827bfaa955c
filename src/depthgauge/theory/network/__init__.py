"""Self-attention networks: the model, random networks, the network file, inputs and traces."""
