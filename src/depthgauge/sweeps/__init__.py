"""Parameter sweeps: grids of cells, the crash-safe store of their rows, and the engines that compute them."""
