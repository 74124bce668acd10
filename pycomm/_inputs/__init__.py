"""Checks and conversions of arguments."""
