"""Spans of requests for OpenTelemetry collectors. No JAX."""
