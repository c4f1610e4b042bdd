"""The built-in texts: one to calibrate with, one to measure on. Disjoint, public domain; sources in README.md beside them."""

from __future__ import annotations

from pathlib import Path


def calibration_text() -> str:
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8")


def heldout_text() -> str:
    return (Path(__file__).parent / "heldout.txt").read_text(encoding="utf-8")
