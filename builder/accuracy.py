"""How much accuracy a compiled model lost: perplexity, KL divergence and agreement of next tokens, teacher-forced.

Works on any `Executor`, so the reference and every target are measured with the same code. Text is cut into windows of `context`
tokens, several windows run as one ragged batch, and each step yields a bounded number of logit rows that are reduced at once:
nothing of size [tokens, vocabulary] is kept.

Units    tokens and nats
Windows  start every `stride` tokens; each token is scored once, in the first window that holds it. With stride = context the
         windows are disjoint; a smaller stride gives every scored token at least context - stride tokens before it
Memory   rows_per_step * vocab_size floats, a few times over, plus one float per scored token
Raises   BuildError when the text is too short or the KV pool cannot hold one window
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.batch import StepInputs
from runtime.errors import BuildError
from runtime.executors.base import Executor

Logits = npt.NDArray[np.float32]
MAX_LOSS = 500.0  # nats per token; a uniform guess over a million tokens loses 14
Progress = Callable[[int, int], None]  # tokens scored so far, tokens to score


@dataclass(frozen=True)
class Accuracy:
    perplexity: float
    num_tokens: int  # scored


@dataclass(frozen=True)
class AccuracyReport:
    """A candidate beside its reference. Field names are those of `Manifest.accuracy`."""

    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    mean_kl: float  # KL(reference ‖ candidate) of next-token distributions
    p99_kl: float
    top1_agreement: float  # fraction of positions whose most likely token is the same
    num_tokens: int


@dataclass(frozen=True)
class Window:
    """input_ids are fed; the last len(targets) of them predict targets."""

    input_ids: tuple[int, ...]
    targets: tuple[int, ...]


def evaluate(executor: Executor, token_ids: Sequence[int], **how: Any) -> Accuracy:
    """Perplexity of `executor` on a text; `how` as `token_losses` takes it."""
    losses = token_losses(executor, token_ids, **how)
    return Accuracy(perplexity=_perplexity(float(losses.mean()), "model"), num_tokens=len(losses))


def token_losses(
    executor: Executor,
    token_ids: Sequence[int],
    *,
    context: int = 512,
    stride: int | None = None,
    batch: int = 8,
    rows_per_step: int = 256,
    bos_token_id: int | None = None,
    progress: Progress | None = None,
) -> npt.NDArray[np.float64]:
    """Nats of each scored token; their order depends on text and windows only, so those of two executors can be paired.

    `bos_token_id` is put before every window, for models trained with one.
    """
    windows = cut(token_ids, context, stride or context, bos_token_id)
    batch = _fitting_batch((executor,), context, batch)
    losses = np.empty(_num_targets(windows))
    scored = 0
    for inputs, targets in _steps(executor.block_size, windows, batch, rows_per_step):
        logits = executor.execute(inputs).logits
        if len(targets):
            losses[scored : scored + len(targets)] = -_log_softmax(logits)[np.arange(len(targets)), targets]
            scored += len(targets)
            if progress is not None:
                progress(scored, len(losses))
    return losses


def compare(
    reference: Executor,
    candidate: Executor,
    token_ids: Sequence[int],
    *,
    context: int = 512,
    stride: int | None = None,
    batch: int = 8,
    rows_per_step: int = 256,
    bos_token_id: int | None = None,
    progress: Progress | None = None,
) -> AccuracyReport:
    """Run both over the same windows in lockstep."""
    if reference.vocab_size != candidate.vocab_size:
        raise BuildError(
            f"the reference has a vocabulary of {reference.vocab_size} but the candidate one of {candidate.vocab_size}; "
            "compare engines of the same model"
        )
    windows = cut(token_ids, context, stride or context, bos_token_id)
    batch = _fitting_batch((reference, candidate), context, batch)
    expected = _num_targets(windows)
    kl = np.empty(expected, np.float32)
    loss, reference_loss, agreed, scored = 0.0, 0.0, 0, 0
    pairs = zip(
        _steps(reference.block_size, windows, batch, rows_per_step),
        _steps(candidate.block_size, windows, batch, rows_per_step),
        strict=True,
    )
    for (reference_inputs, targets), (inputs, _) in pairs:
        reference_logits = reference.execute(reference_inputs).logits
        logits = candidate.execute(inputs).logits
        if not len(targets):
            continue
        agreed += int((reference_logits.argmax(-1) == logits.argmax(-1)).sum())
        p, q = _log_softmax(reference_logits), _log_softmax(logits)
        rows = np.arange(len(targets))
        reference_loss -= float(p[rows, targets].sum(dtype=np.float64))
        loss -= float(q[rows, targets].sum(dtype=np.float64))
        np.subtract(p, q, out=q)
        divergence = (np.exp(p) * q).sum(-1, dtype=np.float64)
        kl[scored : scored + len(targets)] = np.maximum(divergence, 0.0)  # rounding can leave -1e-8 where p = q
        scored += len(targets)
        if progress is not None:
            progress(scored, expected)
    reference_perplexity = _perplexity(reference_loss / scored, "unquantized model")
    perplexity = _perplexity(loss / scored, "engine")
    if not np.isfinite(kl).all():
        raise BuildError(
            f"the KL divergence of {np.count_nonzero(~np.isfinite(kl))} of {scored} held-out tokens is not a number: some logits "
            "are infinite; choose a wider --precision, or check the checkpoint's weights"
        )
    return AccuracyReport(
        perplexity=perplexity,
        reference_perplexity=reference_perplexity,
        perplexity_ratio=math.exp((loss - reference_loss) / scored),
        mean_kl=float(kl.mean(dtype=np.float64)),
        p99_kl=float(np.percentile(kl, 99)),
        top1_agreement=agreed / scored,
        num_tokens=scored,
    )


def _perplexity(loss: float, whose: str) -> float:
    """`loss` is the mean over tokens; beyond MAX_LOSS nats nothing is being predicted, and exp would overflow."""
    if not loss <= MAX_LOSS:
        what = "logits that are not numbers" if math.isnan(loss) else f"a mean loss of {loss:.4g} nats per token"
        remedy = "choose a wider --precision or --kv-cache-dtype" if whose == "engine" else "check the checkpoint's weights"
        raise BuildError(f"the {whose} gives {what} on the held-out text, where at most {MAX_LOSS:.0f} nats are usable; {remedy}")
    return math.exp(loss)


def greedy_divergence(
    reference: Executor, candidate: Executor, prompts: Sequence[Sequence[int]], *, num_tokens: int
) -> tuple[int, ...]:
    """For each prompt, how many greedy tokens agree before the first that differs (`num_tokens` when all agree)."""
    left, right = (_greedy(executor, prompts, num_tokens) for executor in (reference, candidate))
    differs = np.concatenate([left != right, np.ones((len(prompts), 1), bool)], axis=1)
    return tuple(int(first) for first in differs.argmax(axis=1))


# ------------------------------------------------------------------------------------------------------------- windows


def cut(token_ids: Sequence[int], context: int, stride: int, bos_token_id: int | None = None) -> list[Window]:
    prefix = () if bos_token_id is None else (bos_token_id,)
    body = context - len(prefix)
    if not 1 <= stride <= context:
        raise BuildError(f"stride is {stride} but must be in [1, context={context}], or tokens would be left out")
    if body < 1 or len(token_ids) < 2:
        raise BuildError(
            f"{len(token_ids)} tokens in windows of {context} predict nothing; give at least 2 tokens and a context of 2 or more"
        )
    windows: list[Window] = []
    first = 1 - len(prefix)  # first token not yet scored; without a prefix nothing predicts token 0
    for start in range(0, len(token_ids) - 1, min(stride, body)):
        end = min(start + body, len(token_ids) - 1)  # the last token is only predicted, never fed
        windows.append(Window((*prefix, *token_ids[start:end]), tuple(token_ids[first : end + 1])))
        first = end + 1
        if first == len(token_ids):
            break
    return windows


def _num_targets(windows: Sequence[Window]) -> int:
    return sum(len(window.targets) for window in windows)


def _fitting_batch(executors: Sequence[Executor], context: int, batch: int) -> int:
    """The largest number of windows, at most `batch`, whose KV fits every executor's pool."""
    for executor in executors:
        blocks = -(-context // executor.block_size)
        batch = min(batch, executor.num_blocks // blocks)
        if batch < 1:
            raise BuildError(
                f"a window of {context} tokens needs {blocks} KV blocks of {executor.block_size} but the pool has "
                f"{executor.num_blocks}; use a smaller context or a larger KV cache"
            )
    return batch


# --------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Chunk:
    """Sequence number `row` computes `tokens` at positions begin, begin + 1, …"""

    row: int
    begin: int
    tokens: Sequence[int]


def step_inputs(chunks: Sequence[Chunk], wanted: Sequence[int], block_size: int, blocks_per_row: int) -> StepInputs:
    """One ragged step without scheduler or allocator: sequence n owns blocks_per_row blocks from n * blocks_per_row on.

    `wanted` are the rows of the packed tokens whose logits are to be computed.
    """
    positions = np.concatenate([np.arange(c.begin, c.begin + len(c.tokens)) for c in chunks])
    counts = [len(c.tokens) for c in chunks]
    first_slots = np.repeat([c.row * blocks_per_row * block_size for c in chunks], counts)
    return StepInputs(
        input_ids=np.concatenate([np.asarray(c.tokens, np.int64) for c in chunks]),
        positions=positions.astype(np.int64),
        slot_mapping=(first_slots + positions).astype(np.int32),
        block_table=np.array([np.arange(blocks_per_row) + c.row * blocks_per_row for c in chunks], np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([c.begin + len(c.tokens) for c in chunks], np.int32),
        logits_indices=np.array(wanted, np.int64),
    )


def _steps(
    block_size: int, windows: Sequence[Window], batch: int, rows_per_step: int
) -> Iterator[tuple[StepInputs, npt.NDArray[np.int64]]]:
    """Steps, and the targets of their logit rows. Targets do not depend on the block size, so two executors stay in step."""
    length = max(1, rows_per_step // batch)
    blocks_per_row = -(-max(len(window.input_ids) for window in windows) // block_size)
    for first in range(0, len(windows), batch):
        group = windows[first : first + batch]
        for begin in range(0, max(len(window.input_ids) for window in group), length):
            chunks: list[Chunk] = []
            wanted: list[int] = []
            targets: list[int] = []
            offset = 0
            for row, window in enumerate(group):
                tokens = window.input_ids[begin : begin + length]
                if tokens:
                    unscored = len(window.input_ids) - len(window.targets)
                    scored = range(max(begin, unscored), begin + len(tokens))
                    wanted += [offset + position - begin for position in scored]
                    targets += [window.targets[position - unscored] for position in scored]
                    chunks.append(Chunk(row, begin, tokens))
                    offset += len(tokens)
            yield step_inputs(chunks, wanted, block_size, blocks_per_row), np.array(targets, np.int64)


def _greedy(executor: Executor, prompts: Sequence[Sequence[int]], num_tokens: int) -> npt.NDArray[np.int64]:
    """[len(prompts), num_tokens], each prompt prefilled alone and then all decoding together."""
    longest = max(len(prompt) for prompt in prompts) + num_tokens
    if _fitting_batch((executor,), longest, len(prompts)) < len(prompts):
        raise BuildError(
            f"{len(prompts)} sequences of {longest} tokens do not fit {executor.num_blocks} KV blocks of {executor.block_size}; "
            "use fewer or shorter prompts or a larger KV cache"
        )
    size, blocks = executor.block_size, -(-longest // executor.block_size)
    tokens = np.empty((len(prompts), num_tokens), np.int64)
    for row, prompt in enumerate(prompts):
        step = step_inputs([Chunk(row, 0, prompt)], [len(prompt) - 1], size, blocks)
        tokens[row, 0] = executor.execute(step).next_token[0]
    for n in range(1, num_tokens):
        chunks = [Chunk(row, len(prompt) + n - 1, [int(tokens[row, n - 1])]) for row, prompt in enumerate(prompts)]
        tokens[:, n] = executor.execute(step_inputs(chunks, range(len(prompts)), size, blocks)).next_token
    return tokens


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted
