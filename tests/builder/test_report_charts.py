"""report.html shows where accuracy went, and survives any name."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from builder.charts import bars
from builder.report import to_html


def test_bars_are_in_proportion_and_labels_are_escaped() -> None:
    svg = re.search(r"<svg.*</svg>", bars("t", [("a<b", 4.0), ("c", 1.0), ("none", 0.0)], " dB"))
    assert svg is not None
    root = ET.fromstring(svg.group())
    assert [float(rect.attrib["width"]) for rect in root.iter("rect")] == [440.0, 110.0, 0.0]
    assert [text.text for text in root.iter("text")] == ["a<b", "4 dB", "c", "1 dB", "none", "0 dB"]
    assert bars("t", []) == ""


def test_a_report_plots_parts_layers_and_classes() -> None:
    report = {
        "weights": {
            "layers": {"layer.0": {"sqnr_db": 12.5}, "layer.1": {"sqnr_db": 40.0}},
            "classes": {"mlp": {"dtype": "int4", "num_bytes": 2_000_000}},
        },
        "accuracy": {"mean_kl": 0.02, "parts": {"weights": {"mean_kl": 0.01}, "kv_cache": {"mean_kl": 0.015}}},
    }
    page = to_html(report)
    for text in (">weights<", ">kv cache<", ">the engine<", ">0.015<", ">12.5 dB<", ">mlp (int4)<", ">2 MB<"):
        assert text in page, text
    assert page.count("<svg") == 3
    assert to_html({"accuracy": {}}).count("<svg") == 0
