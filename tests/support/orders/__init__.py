"""Explores the orders of events in which ranks of several nodes can agree after a failure."""
