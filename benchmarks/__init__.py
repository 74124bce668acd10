"""Benchmarks that need a clone of the repository."""
