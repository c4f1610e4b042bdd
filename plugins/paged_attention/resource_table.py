"""Registers and shared memory of compiled kernels as Markdown:  python -m plugins.paged_attention.resource_table DIR

DIR is what aot.py wrote. A cell is registers per thread / shared memory in KiB / blocks per SM. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plugins.paged_attention.tuning import ARCHITECTURES, blocks_per_sm


def _cell(facts: dict[str, Any]) -> str:
    resident = blocks_per_sm(
        facts["arch"], registers=facts["registers"], shared_bytes=facts["shared_bytes"], num_warps=facts["num_warps"]
    )
    spills = f" / {facts['spill_bytes']} B spilled" if facts["spill_bytes"] else ""
    return f"{facts['registers']} / {facts['shared_bytes'] / 1024:.0f} / {resident}{spills}"


def table(directory: Path) -> str:
    """A row per kernel, a column per architecture."""
    cells: dict[str, dict[int, str]] = {}
    for path in sorted(directory.glob("sm*/*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        cells.setdefault(facts["name"], {})[facts["arch"]] = _cell(facts)
    archs = [arch for arch in ARCHITECTURES if any(arch in row for row in cells.values())]
    lines = ["| kernel | " + " | ".join(f"sm{arch}" for arch in archs) + " |", "|---" * (len(archs) + 1) + "|"]
    for name in sorted(cells):
        lines.append(f"| `{name}` | " + " | ".join(cells[name].get(arch, "") for arch in archs) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1])))
