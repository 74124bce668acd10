"""Adapters for training frameworks: a module for each framework, which imports it."""

from __future__ import annotations


def missing(module: str, package: str) -> ImportError:
    """The error of an adapter whose framework is not installed."""
    return ImportError(f"pycomm.integrations.{module} needs {package}: pip install {package}")
