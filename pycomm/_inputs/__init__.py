"""What callers pass: checks and conversions."""
