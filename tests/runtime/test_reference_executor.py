"""The canonical graph on ONNX Runtime against Hugging Face eager fp32, for every family.

Tolerance: max|a-b| / max|b| ≤ 1e-5, some tens of float32 roundings; a wrong mask, norm or scale is off by 1e-2 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models

from runtime.batch import StepInputs
from runtime.errors import EngineError
from runtime.executors.reference import ReferenceExecutor

TOLERANCE = 1e-5
BLOCK = 4


class Sequence:
    """Tokens, the blocks that hold them, and how far they are computed."""

    def __init__(self, token_ids: list[int], blocks: list[int]) -> None:
        self.token_ids, self.blocks, self.computed = token_ids, blocks, 0


def step(executor: ReferenceExecutor, work: list[tuple[Sequence, int]], rows: list[int] | None = None) -> Any:
    """Compute `count` more tokens of each sequence in one ragged batch; logits of every row unless `rows` says which."""
    size = executor.block_size
    counts = [count for _, count in work]
    positions = [np.arange(s.computed, s.computed + count) for s, count in work]
    table = np.zeros((len(work), max(len(s.blocks) for s, _ in work)), np.int32)
    for row, (s, _) in enumerate(work):
        table[row, : len(s.blocks)] = s.blocks
    slots = [table[row, p // size] * size + p % size for row, p in enumerate(positions)]
    inputs = StepInputs(
        input_ids=np.concatenate([s.token_ids[s.computed : s.computed + count] for s, count in work]).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        block_table=table,
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([s.computed + count for s, count in work], np.int32),
        logits_indices=np.array(range(sum(counts)) if rows is None else rows, np.int64),
    )
    output = executor.execute(inputs)
    for s, count in work:
        s.computed += count
    return output


def relative_error(actual: Any, expected: Any) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def sequences() -> list[Sequence]:
    """Prompts of 23, 1 and 9 tokens; blocks scattered over a pool of 32, so that a block id is never its index."""
    rng = np.random.default_rng(0)
    blocks = ([7, 3, 9, 1, 30, 2, 4], [11], [20, 5, 28])
    return [Sequence(rng.integers(3, tiny_models.VOCAB_SIZE, n).tolist(), b) for n, b in zip((23, 1, 9), blocks, strict=True)]


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_family_matches_hugging_face(name: str, exported: Callable[[str], Any]) -> None:
    """Ragged batch, prompts in chunks beside decodes, prompts longer than the window, every page outside a sequence is NaN."""
    model = exported(name)
    executor = ReferenceExecutor(model.reference, num_blocks=32, block_size=BLOCK, num_threads=1, pool_fill=float("nan"))
    long, single, short = sequences()
    expected = {id(s): tiny_models.logits(model.model, s.token_ids) for s in (long, single, short)}
    plan = [
        [(long, 5), (short, 4)],  # two first chunks; the second chunk starts inside a block
        [(long, 6), (single, 1), (short, 1)],  # a chunk, a one-token prompt and a decode
        [(short, 3), (long, 1)],  # order in the batch changed
        [(long, 11), (short, 1)],
    ]
    for work in plan:
        wanted = np.concatenate([expected[id(s)][s.computed : s.computed + count] for s, count in work])
        output = step(executor, work)
        assert output.logits.shape == (len(wanted), tiny_models.VOCAB_SIZE)
        assert relative_error(output.logits, wanted) <= TOLERANCE
        assert output.next_token.tolist() == output.logits.argmax(-1).tolist()
    assert (long.computed, single.computed, short.computed) == (23, 1, 9)


def test_only_the_rows_asked_for_come_back(exported: Callable[[str], Any]) -> None:
    model = exported("llama")
    executor = ReferenceExecutor(model.reference, num_blocks=32, block_size=BLOCK, num_threads=1)
    long, _, short = sequences()
    expected = np.stack([tiny_models.logits(model.model, s.token_ids)[row] for s, row in ((short, 8), (long, 2))])
    output = step(executor, [(long, 10), (short, 9)], rows=[18, 2])
    assert relative_error(output.logits, expected) <= TOLERANCE
    output = step(executor, [(long, 3)], rows=[])
    assert output.logits.shape == (0, tiny_models.VOCAB_SIZE)
    assert output.next_token.shape == (0,)


def test_block_size_is_the_executors_choice(exported: Callable[[str], Any]) -> None:
    model = exported("llama")
    executor = ReferenceExecutor(model.reference, num_blocks=5, block_size=7, num_threads=1)
    sequence = Sequence(sequences()[0].token_ids, [4, 0, 3, 1])
    expected = tiny_models.logits(model.model, sequence.token_ids)
    assert relative_error(step(executor, [(sequence, 20)]).logits, expected[:20]) <= TOLERANCE
    assert relative_error(step(executor, [(sequence, 3)]).logits, expected[20:]) <= TOLERANCE


def test_copied_blocks_hold_the_same_sequence(exported: Callable[[str], Any]) -> None:
    model = exported("llama")
    executor = ReferenceExecutor(model.reference, num_blocks=32, block_size=BLOCK, num_threads=1, pool_fill=float("nan"))
    original = sequences()[0]
    step(executor, [(original, 10)])
    executor.copy_blocks([])
    executor.copy_blocks([(7, 12), (3, 13), (9, 14)])
    fork = Sequence([*original.token_ids[:10], 5, 6, 7], [12, 13, 14, 15])
    fork.computed = 10
    expected = tiny_models.logits(model.model, fork.token_ids)[10:]
    assert relative_error(step(executor, [(fork, 3)]).logits, expected) <= TOLERANCE
    assert relative_error(step(executor, [(original, 3)]).logits, tiny_models.logits(model.model, original.token_ids)[10:13]) <= (
        TOLERANCE
    )


def test_sizes_are_read_from_the_file(exported: Callable[[str], Any]) -> None:
    executor = ReferenceExecutor(exported("llama").reference, num_blocks=32, block_size=BLOCK, num_threads=1)
    assert executor.vocab_size == tiny_models.VOCAB_SIZE
    assert executor.kv_cache_bytes() == 32 * BLOCK * 2 * 16 * 4 * 2 * tiny_models.LAYERS  # Hkv 2, D 16, float32, keys and values
    executor.close()


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(EngineError, match=r"model.onnx cannot be loaded by ONNX Runtime .*; rebuild the engine"):
        ReferenceExecutor(path, num_blocks=1)
