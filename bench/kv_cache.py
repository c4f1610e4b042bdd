"""What the KV cache buys: cost of each further token with it, and without it by running the whole sequence again.

    python bench/kv_cache.py [--model smollm2-135m-instruct] [--precision fp32] [--length 1024] [--plot kv_cache.png]
    python bench/kv_cache.py --engine DIR

With the cache a step computes one token, so N tokens cost O(N) (plus the attention's reading, which grows with length); without
it step t computes t tokens, so N tokens cost O(N²). Both run the same engine through the Executor protocol, take turns so that
drift falls on both, and must choose the same tokens. The plot shows cost per step and cumulative cost with its fitted exponent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from builder.accuracy import Chunk, step_inputs
from runtime.executors.base import Executor

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Seconds of the step that computes the token after `lengths` tokens."""

    lengths: npt.NDArray[np.int64]
    cached: Floats
    uncached: Floats
    tokens_agree: bool

    def cumulative(self, seconds: Floats) -> Floats:
        """Cost of generating up to each length, steps between the measured ones interpolated."""
        every = np.arange(1, self.lengths[-1] + 1)
        return np.cumsum(np.interp(every, self.lengths, seconds))[self.lengths - 1]

    def exponent(self, seconds: Floats) -> float:
        """p of the best fit c·N^p to the cumulative cost over the upper half of the lengths; 1 is linear, 2 quadratic."""
        upper = self.lengths >= self.lengths[-1] / 2
        slope, _ = np.polyfit(np.log(self.lengths[upper]), np.log(self.cumulative(seconds)[upper]), 1)
        return float(slope)


def measure(
    executor: Executor,
    prompt: Sequence[int],
    *,
    length: int,
    every: int,
    repetitions: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Curves:
    """Greedy continuation of `prompt` to `length` tokens; first, last and every `every`th step timed, medians kept."""
    blocks = -(-(length + 1) // executor.block_size)
    assert 2 * blocks <= executor.num_blocks, f"two sequences need {2 * blocks} blocks, the pool has {executor.num_blocks}"

    def run(row: int, begin: int, tokens: Sequence[int]) -> tuple[int, float]:
        inputs = step_inputs([Chunk(row, begin, tokens)], [len(tokens) - 1], executor.block_size, blocks)
        start = clock()
        output = executor.execute(inputs)
        return int(output.next_token[0]), clock() - start

    cached_row, uncached_row = 0, 1
    sequence = list(prompt)
    token, _ = run(cached_row, 0, sequence)
    lengths, cached, uncached, agree = [], [], [], True
    while len(sequence) < length:
        sequence.append(token)
        last = len(sequence) - 1
        token, _ = run(cached_row, last, sequence[last:])
        if len(sequence) % every == 0 or len(sequence) in (len(prompt) + 1, length):
            # both recompute what is already there, so repeating changes nothing
            pairs = [(run(cached_row, last, sequence[last:]), run(uncached_row, 0, sequence)) for _ in range(repetitions)]
            lengths.append(len(sequence))
            cached.append(float(np.median([seconds for (_, seconds), _ in pairs])))
            uncached.append(float(np.median([seconds for _, (_, seconds) in pairs])))
            agree &= all(other == token for _, (other, _) in pairs)
    return Curves(np.array(lengths), np.array(cached), np.array(uncached), agree)


def plot(curves: Curves, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (step, total) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, seconds in (("KV cache", curves.cached), ("no cache", curves.uncached)):
        step.plot(curves.lengths, 1e3 * seconds, ".-", label=label)
        total.plot(curves.lengths, curves.cumulative(seconds), ".-", label=f"{label}: N^{curves.exponent(seconds):.2f}")
    step.set(title=f"{title}: one step", xlabel="sequence length, tokens", ylabel="ms")
    total.set(title="all steps so far", xlabel="sequence length, tokens", ylabel="s")
    for axes in (step, total):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    from common import OUT, engine_directory, finish

    from runtime.config import RuntimeConfig, resolve
    from runtime.contract import load_manifest
    from runtime.executors import load_executor

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, help="an engine directory; otherwise --model is built")
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--every", type=int, default=64, help="tokens between two measured lengths")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=OUT / "kv_cache.png")
    options = parser.parse_args()

    engine = options.engine or engine_directory(options.model, options.precision)
    manifest = load_manifest(engine)
    blocks = 2 * -(-(options.length + 1) // manifest.kv_cache.block_size)
    resolved = resolve(RuntimeConfig(num_blocks=blocks, max_model_len=options.length), manifest)
    executor = load_executor(engine, manifest, resolved)
    try:
        prompt = [manifest.model.bos_token_id or 0]
        curves = measure(executor, prompt, length=options.length, every=options.every, repetitions=options.repetitions)
    finally:
        executor.close()
    plot(curves, manifest.model.name, options.plot)
    totals = {name: curves.cumulative(getattr(curves, name))[-1] for name in ("cached", "uncached")}
    finish(
        "kv_cache",
        model=manifest.model.name,
        precision=manifest.precision.name,
        kv_cache=manifest.kv_cache.key_dtype,
        lengths=curves.lengths.tolist(),
        cached_step_ms=[round(1e3 * value, 3) for value in curves.cached.tolist()],
        uncached_step_ms=[round(1e3 * value, 3) for value in curves.uncached.tolist()],
        cached_total_s=round(totals["cached"], 3),
        uncached_total_s=round(totals["uncached"], 3),
        total_ratio=round(totals["uncached"] / totals["cached"], 1),
        cached_exponent=round(curves.exponent(curves.cached), 3),
        uncached_exponent=round(curves.exponent(curves.uncached), 3),
        tokens_agree=curves.tokens_agree,
        plot=str(options.plot),
    )


if __name__ == "__main__":
    main()
