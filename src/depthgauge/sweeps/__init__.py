"""From a grid to rows: cells with an identity, a store that survives, engines that compute."""
