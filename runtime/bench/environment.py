"""What a figure was measured with: machine, versions, date. Every report carries it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

from runtime import __version__
from runtime.config import free_memory_bytes, machine_name

LIBRARIES = ("openvino", "onnxruntime", "numpy", "tokenizers", "tritonclient")


def environment(libraries: Iterable[str] = LIBRARIES) -> dict[str, Any]:
    versions = {"forgeline": __version__, "python": platform.python_version()}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "name": machine_name(),
            "system": f"{platform.system()} {platform.release()}",
            "free_memory_bytes": free_memory_bytes(),
            "load_average": [round(value, 2) for value in os.getloadavg()],
        },
        "versions": versions,
    }
