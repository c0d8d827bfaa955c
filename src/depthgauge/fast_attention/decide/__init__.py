"""The choice of a path for every head: bounds on scores, polynomials with proved errors, predicted costs."""
