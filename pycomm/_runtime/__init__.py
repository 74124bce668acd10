"""Rendezvous of ranks, and the transports of their data."""
