"""The tasks of sweeps."""
