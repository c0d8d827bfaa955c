"""Draw the figures of both papers and our own."""
