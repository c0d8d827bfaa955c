"""A result document as one page that opens from disk: nothing is computed here, and nothing is fetched."""
