"""What the polynomial path rests on: proved bounds, minimax polynomials, and predicted costs."""
