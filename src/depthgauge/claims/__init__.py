"""The ledger of claims: every numbered statement of both papers, decided by running a search for what breaks it."""
