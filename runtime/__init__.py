"""Runs Forgeline engines: `from runtime import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "RuntimeConfig", "SamplingParams"]

if TYPE_CHECKING:
    from runtime.config import RuntimeConfig
    from runtime.llm import LLM
    from runtime.request import SamplingParams


def __getattr__(name: str) -> Any:
    """Import on first use: `runtime.contract` must stay free of numpy and OpenVINO."""
    import importlib

    homes = {"LLM": "runtime.llm", "SamplingParams": "runtime.request", "RuntimeConfig": "runtime.config"}
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
