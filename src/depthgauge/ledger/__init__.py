"""The ledger: every numbered statement of both papers, decided by a search for a counterexample."""
