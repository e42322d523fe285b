"""Measurements: load against a running server, comparisons, and named scenarios."""
