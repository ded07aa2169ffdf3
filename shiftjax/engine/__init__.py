"""The serving loop: schedule, choose, run, commit."""
