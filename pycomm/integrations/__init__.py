"""Adapters for training and serving frameworks: a module for each, which imports it."""

from __future__ import annotations

import os


def missing(module: str, package: str) -> ImportError:
    """The error of an adapter whose framework is not installed."""
    return ImportError(f"pycomm.integrations.{module} needs {package}: pip install {package}")


def vllm_platform() -> str | None:
    """The platform of vLLM with pycomm's collectives, if ``VLLM_PLUGINS`` names pycomm.

    vLLM calls this in each of its processes, because it is an entry point of the package.
    """
    asked = "pycomm" in os.environ.get("VLLM_PLUGINS", "").split(",")
    return "pycomm.integrations.vllm_platform.Platform" if asked else None
