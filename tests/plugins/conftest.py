from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton", reason="no kernel compiler for this Python version or platform")
    session = Interpreter()
    yield session
    session.close()
