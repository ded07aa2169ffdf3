"""From settings to a running server process."""
