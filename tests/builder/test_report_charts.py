"""report.html shows where accuracy went, and survives any name."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builder.charts import bars
from builder.cli import main as builder
from builder.report import _bytes_per_weight, to_html


def test_bars_are_in_proportion_and_labels_are_escaped() -> None:
    svg = re.search(r"<svg.*</svg>", bars("t", [("a<b", 4.0), ("c", 1.0), ("none", 0.0)], " dB"))
    assert svg is not None
    root = ET.fromstring(svg.group())
    assert [float(rect.attrib["width"]) for rect in root.iter("rect")] == [440.0, 110.0, 0.0]
    assert [float(rect.attrib["y"]) for rect in root.iter("rect")] == [3.0, 23.0, 43.0]
    assert [float(text.attrib["y"]) for text in root.iter("text")] == [14.0, 14.0, 34.0, 34.0, 54.0, 54.0]
    assert [text.text for text in root.iter("text")] == ["a<b", "4 dB", "c", "1 dB", "none", "0 dB"]
    assert bars("t", []) == ""


def test_a_report_plots_parts_layers_and_classes() -> None:
    report = {
        "weights": {
            "layers": {"layer.0": {"sqnr_db": 12.5}, "layer.1": {"sqnr_db": 40.0}},
            "classes": {"mlp": {"dtype": "int4", "num_bytes": 2_000_000}},
        },
        "accuracy": {
            "mean_kl": 0.02,
            "parts": {"weights": {"mean_kl": 0.01}, "kv_cache": {"mean_kl": 0.015}},
            "kv_cache_sqnr_db": {"layers.1.keys": 9.25, "layers.0.values": 30.0},
        },
    }
    page = to_html(report)
    for text in (
        ">weights<",
        ">kv cache<",
        ">the engine<",
        ">0.015<",
        ">12.5 dB<",
        ">layers.1.keys<",
        ">9.25 dB<",
        ">mlp (int4)<",
        ">2 MB<",
    ):
        assert text in page, text
    assert page.count("<svg") == 4
    assert page.index(">layer.0<") < page.index(">layer.1<")
    assert to_html({"accuracy": {}}).count("<svg") == 0


def test_only_the_twenty_noisiest_layers_are_plotted() -> None:
    layers = {f"layer.{number}": {"sqnr_db": 10.0 + number} for number in range(25)}
    svg = re.search(r"<svg.*?</svg>", to_html({"weights": {"layers": layers}}))
    assert svg is not None
    assert [text.text for text in ET.fromstring(svg.group()).iter("text")][::2] == list(layers)[:20]


@pytest.mark.parametrize(
    ("classes", "tied", "text"),
    [
        ({"embedding": {"dtype": "int8"}}, True, "0.57 bytes/weight in the layers, 0.66 with the int8 embedding and head"),
        (
            {"embedding": {"dtype": "fp32"}, "lm_head": {"dtype": "int8"}},
            False,
            "0.57 bytes/weight in the layers, 0.66 with the fp32 and int8 embedding and head",
        ),
        ({"embedding": {"dtype": "int8"}}, False, "0.57 bytes/weight in the layers, 0.66 with the int8 embedding"),
        ({"mlp": {"dtype": "int4"}}, False, "0.57 bytes/weight in the layers, 0.66 in all"),
    ],
)
def test_bytes_per_weight_are_told_with_and_without_the_tables(classes: dict[str, Any], tied: bool, text: str) -> None:
    weights = {"layers_bytes_per_weight": 0.5664, "bytes_per_weight": 0.661, "classes": classes, "tied_embedding": tied}
    assert _bytes_per_weight(weights) == text


def test_an_int4_engine_has_at_most_0_6_bytes_per_weight_in_its_layers(
    tiny_engine: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_engine("int4")
    weights = json.loads((directory / "report.json").read_text())["weights"]
    assert 0.5 < weights["layers_bytes_per_weight"] <= 0.6
    classes = weights["classes"]
    layers = [classes[name] for name in ("attention", "mlp")]
    stored = sum(entry["num_bytes"] for entry in layers) / sum(entry["num_weights"] for entry in layers)
    assert weights["layers_bytes_per_weight"] == pytest.approx(stored)
    assert weights["bytes_per_weight"] == pytest.approx(
        sum(entry["num_bytes"] for entry in classes.values()) / sum(entry["num_weights"] for entry in classes.values())
    )
    assert builder(["inspect", str(directory)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))
    told = f"{stored:.2f} bytes/weight in the layers, {weights['bytes_per_weight']:.2f} with the int8 embedding and head"
    assert line.endswith(told)
