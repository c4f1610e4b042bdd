"""The table of precisions says which figure misses its limit and which two are too far apart, and lands between its markers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import precision_table
from precision_table import ROWS, Row


@pytest.mark.parametrize(
    ("engine", "reference", "apart", "mark"),
    [
        (1.01, 1.01, 0.005, "pass"),
        (1.0101, 1.0, 0.0, "MISS"),
        (1.0, 1.0101, 0.0, "MISS"),
        (1.0, 1.0, -0.0051, "APART"),
        (1.02, 1.0, 0.02, "MISS APART"),
    ],
)
def test_a_row_passes_within_its_limit_and_half_a_per_cent(engine: float, reference: float, apart: float, mark: str) -> None:
    assert precision_table.verdict(Row(1.01), {"engine": engine, "reference": reference, "apart": apart}) == mark


def test_rows_without_engine_or_limit() -> None:
    assert precision_table.verdict(Row(1.01), {"reference": 1.01}) == "pass"
    assert precision_table.verdict(Row(1.01), {"reference": 1.02}) == "MISS"
    assert precision_table.verdict(Row(None), {"engine": 9.0, "reference": 9.0, "apart": 0.0}) == ""


def test_ratio_and_error_are_of_pairs() -> None:
    base = np.array([1.0, 5.0, 9.0, 2.0])
    losses = base + np.array([0.1, 0.3, 0.1, 0.3])
    assert precision_table._ratio(losses, base) == pytest.approx(np.exp(0.2))
    assert precision_table._error(losses, base) == pytest.approx(0.1 / 2)


def test_the_table_replaces_what_stands_between_its_markers(tmp_path: Path) -> None:
    measured = {
        "kv:f8": {"reference": 1.0026, "reference_error": 0.001},
        "fp8": {"engine": 1.0176, "reference": 1.0232, "reference_error": 0.004, "apart": -0.0055, "apart_error": 0.0047},
    }
    table = precision_table.markdown(measured, 16.0212, 2047, "the command")
    assert (
        table.splitlines()[0]
        == "`the command` (2047 tokens scored, fp32 perplexity 16.021; ± is one standard error over tokens):"
    )
    assert table.splitlines()[4:] == [
        "| fp8 | 1.03 | 1.0176 | 1.0232 ± 0.0040 | -0.55 % ± 0.47 | APART |",
        "| kv:f8 | 1.01 | no kernel | 1.0026 ± 0.0010 |  | pass |",
    ]
    begin, end = precision_table.MARKERS
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    precision_table.write(page, table)
    precision_table.write(page, table)
    assert page.read_text() == f"before\n{begin}\n{table}\n{end}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match=r"page\.md lacks the lines"):
        precision_table.write(page, table)


def test_every_figure_that_was_promised_has_a_row() -> None:
    limits = {name: row.limit for name, row in ROWS.items() if row.limit is not None}
    assert limits == {
        "int8-wo": 1.01, "int8": 1.02, "fp8": 1.03, "int8-sq": 1.05, "int4-g64": 1.12, "int4-g32": 1.08,
        "int8 bf16": 1.02, "int4-g64 bf16": 1.12,
        "kv:f16": 1.001, "kv:u8": 1.01, "kv:u8:u4": 1.01, "kv:f8": 1.01, "kv:bf16:f8": 1.005,
    }  # fmt: skip
