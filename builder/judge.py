"""The accuracy section of a build: the engine beside the unquantized model on held-out text, and where its loss comes from.

engine        what will be served, on the target's executor: perplexity, KL divergence, agreement, greedy divergence
parts         the quantized canonical graph on the reference executor, with weights rounded; and activations; and KV cache
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from builder.accuracy import Progress, compare, greedy_divergence
from builder.quantize.strip import strip
from runtime.executors.base import Executor
from runtime.executors.reference import ReferenceExecutor

CONTEXT = 512  # tokens per held-out window
PART_TOKENS = 512
GREEDY_PROMPTS, GREEDY_PROMPT_TOKENS, GREEDY_TOKENS = 4, 32, 32
_BLOCK = 32


def judge(
    reference_graph: Path,
    candidate: Callable[[], Executor],
    token_ids: Sequence[int],
    *,
    context: int = CONTEXT,
    bos_token_id: int | None = None,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`candidate` makes an executor whose pool holds `pool_tokens(context)`."""
    reference = reference_executor(reference_graph, context, num_threads)
    engine = candidate()
    try:
        report = compare(reference, engine, token_ids, context=context, batch=1, bos_token_id=bos_token_id, progress=progress)
        result: dict[str, Any] = dataclasses.asdict(report)
        prompts = _prompts(token_ids, bos_token_id)
        if prompts:
            result["greedy_divergence"] = list(greedy_divergence(reference, engine, prompts, num_tokens=GREEDY_TOKENS))
            result["greedy_tokens"] = GREEDY_TOKENS
    finally:
        reference.close()
        engine.close()
    return result


def parts(
    reference_graph: Path,
    quantized_graph: Path,
    token_ids: Sequence[int],
    *,
    context: int = CONTEXT,
    bos_token_id: int | None = None,
    num_threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, float]]:
    """Each part is measured together with those before it; a part the graph does not have is left out."""
    found = {}
    for index, (name, without) in enumerate(_PARTS.items()):
        if progress is not None:
            progress(index, len(_PARTS))
        model = ir.load(quantized_graph)
        if name != "weights" and not strip(ir.load(quantized_graph), **{name: True}):
            continue
        strip(model, **without)
        with tempfile.NamedTemporaryFile(dir=quantized_graph.parent, prefix=".part-", suffix=".onnx") as file:
            ir.save(model, file.name)
            candidate = reference_executor(Path(file.name), context, num_threads)
        reference = reference_executor(reference_graph, context, num_threads)
        try:
            report = compare(reference, candidate, token_ids, context=context, batch=1, bos_token_id=bos_token_id)
        finally:
            reference.close()
            candidate.close()
        found[name] = {"perplexity_ratio": report.perplexity_ratio, "mean_kl": report.mean_kl, "num_tokens": report.num_tokens}
    return found


_PARTS: dict[str, dict[str, bool]] = {
    "weights": {"activations": True, "kv_cache": True},
    "activations": {"kv_cache": True},
    "kv_cache": {},
}


def pool_tokens(context: int) -> int:
    """Tokens an executor must hold to be judged, in blocks of any size up to 64."""
    return max(context, GREEDY_PROMPTS * 64 * -(-(GREEDY_PROMPT_TOKENS + GREEDY_TOKENS) // 64))


def reference_executor(graph: Path, context: int, num_threads: int) -> ReferenceExecutor:
    return ReferenceExecutor(graph, num_blocks=-(-pool_tokens(context) // _BLOCK), block_size=_BLOCK, num_threads=num_threads)


def _prompts(token_ids: Sequence[int], bos_token_id: int | None) -> list[list[int]]:
    prefix = [] if bos_token_id is None else [bos_token_id]
    body = GREEDY_PROMPT_TOKENS - len(prefix)
    step = max(1, (len(token_ids) - body) // GREEDY_PROMPTS)
    if len(token_ids) < body:
        return []
    return [prefix + list(token_ids[begin : begin + body]) for begin in range(0, len(token_ids) - body + 1, step)][
        :GREEDY_PROMPTS
    ]
