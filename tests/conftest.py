"""Fixtures shared by all test files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.contract import cache_root

sys.path.insert(0, str(Path(__file__).parent / "builder"))  # tiny_models, for tests in other directories


@dataclass(frozen=True)
class Exported:
    """A tiny model and its canonical graph. Shared by the whole session: load the files, never change them or the model."""

    model: Any  # transformers, fp32, eager
    spec: Any  # ModelSpec
    canonical: Path  # .onnx as export_model returns it, weights in the file
    reference: Path  # the same with the custom ops' functions attached: ONNX Runtime runs it


@pytest.fixture(scope="session", autouse=True)
def one_library_of_kernels() -> None:
    """Tests with caches of their own, and the processes they start, do not compile the CPU kernels again."""
    os.environ.setdefault("FORGELINE_KERNELS", str(cache_root() / "kernels"))


@pytest.fixture(scope="session", autouse=True)
def engines_of_earlier_runs_are_not_copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a build does and says must not depend on whether these tests have run here before."""
    from builder import cache

    users, own, place = cache._engines(), tmp_path_factory.mktemp("built"), cache._engines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_engines", lambda: own if place() == users else place())
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """`exported(name)` for a name of tiny_models.NAMES; each model is built and exported once per session."""
    cache: dict[str, Exported] = {}

    def get(name: str) -> Exported:
        if name not in cache:
            import onnx_ir as ir
            import tiny_models

            from builder.checkpoint import model_spec
            from builder.export import export_model
            from plugins.paged_attention.op import attach_functions

            directory = tmp_path_factory.mktemp(name)
            model = tiny_models.build(name)
            spec = model_spec(model, name=f"tiny-{name}")
            graph = export_model(model, spec)
            ir.save(graph, directory / "canonical.onnx")
            ir.save(attach_functions(graph), directory / "reference.onnx")
            cache[name] = Exported(model, spec, directory / "canonical.onnx", directory / "reference.onnx")
        return cache[name]

    return get


TINY_LLAMA = Path(__file__).parent / "models" / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_engine(precision)`: a CPU engine of the trained tiny Llama, built once per session. Do not change its files."""
    engines: dict[str, Path] = {}

    def get(precision: str = "fp32") -> Path:
        if precision not in engines:
            from builder.build import build
            from builder.config import BuildConfig

            output = tmp_path_factory.mktemp("engines") / f"tiny-{precision}"
            build(BuildConfig(str(TINY_LLAMA), output, precision=precision, eval_tokens=0), quiet=True)
            engines[precision] = output
        return engines[precision]

    return get


@pytest.fixture(scope="session")
def cpu_kernels() -> Path:
    """The CPU kernels' library, compiled unless it is in the cache; skips where it cannot be."""
    from builder.targets.openvino_kernels import library
    from plugins.quantized_matmul import native

    if reason := native.why_not():
        pytest.skip(reason)
    return library()
