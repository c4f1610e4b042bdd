from __future__ import annotations

import pytest
import sampler_steps

from plugins.sampling.native.choose import Choose


@pytest.fixture(params=["numpy", "compiled"])
def both_ways_to_choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of sampler_steps.py come from an executor without a kernel for sampling, then from one with it."""
    if request.param == "compiled":
        choose = Choose.of(request.getfixturevalue("cpu_kernels"), num_threads=2)
        assert choose is not None
        monkeypatch.setattr(sampler_steps, "CHOOSE", choose)
