"""Self-attention networks: measures, surrogates, certificates, effective depth. Nothing about checkpoints."""
