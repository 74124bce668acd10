"""Reads the kernels' machine code and compares it with limits: ``python -m sass`` in tests/cpp."""
