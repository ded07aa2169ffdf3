"""The evaluations of published systems, run again on simulated devices."""
