"""What every package uses: errors, progress, files, locks, the journal of a run, formatting."""
