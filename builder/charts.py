"""Bar charts as inline SVG for report.html. Knows numbers and labels only."""

from __future__ import annotations

import html
from collections.abc import Sequence

_WIDTH, _ROW, _LABEL, _VALUE = 860, 20, 330, 90


def bars(title: str, rows: Sequence[tuple[str, float]], unit: str = "") -> str:
    """Horizontal bars from zero, one per row in the order given; empty without rows. Negative values have no bar."""
    if not rows:
        return ""
    largest = max((value for _, value in rows), default=0.0)
    scale = (_WIDTH - _LABEL - _VALUE) / largest if largest > 0 else 0.0
    parts = [
        f"<figure><figcaption>{html.escape(title)}</figcaption>",
        f"<svg role='img' width='{_WIDTH}' height='{_ROW * len(rows)}' viewBox='0 0 {_WIDTH} {_ROW * len(rows)}' font-size='12'>",
    ]
    for index, (label, value) in enumerate(rows):
        y, width = _ROW * index, max(0.0, value * scale)
        parts.append(
            f"<text x='{_LABEL - 6}' y='{y + 14}' text-anchor='end'>{html.escape(label)}</text>"
            f"<rect x='{_LABEL}' y='{y + 3}' width='{width:.1f}' height='{_ROW - 6}' fill='#4878a8'/>"
            f"<text x='{_LABEL + width + 5:.1f}' y='{y + 14}'>{value:.4g}{html.escape(unit)}</text>"
        )
    return "".join(parts) + "</svg></figure>"
