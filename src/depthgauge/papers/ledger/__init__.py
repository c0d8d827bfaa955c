"""The ledger: every numbered statement of two papers, each checked by a search for a counterexample.

Paper A is "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse". Paper B is
"Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention". `claims` of `registry` checks
them: `search` finds a violation and makes it a witness, and `registry` explains the finding.
"""
