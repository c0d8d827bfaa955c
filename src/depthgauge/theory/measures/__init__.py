"""Measurements on the trace of a network. Each quantity is one function; a `Profile` collects them."""
