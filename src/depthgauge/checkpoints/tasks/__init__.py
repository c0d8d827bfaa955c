"""Texts and tasks that a loaded model is measured on, and confidence intervals of what was measured."""
