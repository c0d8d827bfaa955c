"""Decide how each head is computed: score bounds, polynomials, costs."""
