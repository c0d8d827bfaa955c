"""Run the blocks of a loaded model, change them, and observe what they compute."""
