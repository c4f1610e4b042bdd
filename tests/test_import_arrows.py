"""Imports go one way (ARCHITECTURE.md). Read from the source, so that lazy imports inside functions count too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "gguf", "safetensors"}
LEAVES = {"runtime.request", "runtime.errors"}
# module → runtime modules it may import besides the leaves (request, errors)
ARROWS = {
    "runtime.errors": set(),
    "runtime.request": set(),
    "runtime.contract": set(),
    "runtime.config": {"runtime.contract", "runtime.memory"},
    "runtime.padding": {"runtime.batch"},
    "runtime.memory": {"runtime.contract", "runtime.padding"},
    "runtime.block_pool": set(),
    "runtime.batch": set(),
    "runtime.kv_cache": set(),
    "runtime.prefix_reuse": {"runtime.block_pool"},
    "runtime.step_cost": set(),
    "runtime.scheduler": {"runtime.block_pool", "runtime.prefix_reuse", "runtime.batch", "runtime.step_cost"},
    "runtime.logits": set(),
    "runtime.row_state": set(),
    "runtime.sampler": {"runtime.executors.base", "runtime.logits", "runtime.row_state"},
    "runtime.detokenizer": set(),
    "runtime.chat_template": set(),
    "runtime.tokenizer": {"runtime.detokenizer", "runtime.chat_template"},
    "runtime.text": {"runtime.detokenizer"},
    "runtime.metrics": set(),
    "runtime.executors.base": {"runtime.batch"},
    "runtime.loop": {"runtime.scheduler", "runtime.batch", "runtime.executors.base", "runtime.sampler", "runtime.block_pool"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_runtime_never_imports_builder_nor_the_export_libraries() -> None:
    for path in modules("runtime"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & (HEAVY | {"builder"}), f"{path} imports {roots & (HEAVY | {'builder'})}"


def test_plugins_import_neither_builder_nor_runtime() -> None:
    for path in modules("plugins"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & {"builder", "runtime"}, path


def test_builder_uses_the_contract_and_what_it_measures_with() -> None:
    """Executors, tokenizer and step inputs to calibrate and to judge accuracy; never the engine, its loop or its scheduler."""
    allowed = {"runtime", "runtime.contract", "runtime.errors", "runtime.batch", "runtime.memory", "runtime.tokenizer"}
    for path in modules("builder"):
        used = {name for name in imports_of(path) if name.split(".")[0] == "runtime"} - allowed
        if name_of(path) == "builder.deploy":
            used -= {"runtime.serving.options", "runtime.serving.tensors"}
        assert not {name for name in used if not name.startswith("runtime.executors.")}, f"{path} imports {used}"


@pytest.mark.parametrize("module", sorted(ARROWS))
def test_runtime_arrows(module: str) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    used = {name for name in imports_of(path) if name.startswith("runtime")}
    assert used <= ARROWS[module] | LEAVES - {module}, f"{module} imports {used - ARROWS[module] - LEAVES}"


def test_contract_needs_the_standard_library_only() -> None:
    import sys

    for name in imports_of(ROOT / "runtime/contract.py"):
        assert name.split(".")[0] in sys.stdlib_module_names | {"runtime"}, name
