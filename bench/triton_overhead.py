"""What the server costs: tokens/s of concurrent gRPC streams through the real Triton, beside the same engine in this process.

Both run the same prompts, greedy, EOS ignored, in turn, so that drift of the machine falls on both; the client is a process of
its own on the same cores. Prints tokens/s of each, their ratio, and how many tokens came together in one response.

    python bench/triton_overhead.py --model smollm2-135m-instruct --precision int8 --streams 16
    python bench/triton_overhead.py --engine DIR --streams 32
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import add_engine_options, chosen_engine, facts, finish, median, run_closed_loop

from builder.data import heldout_text
from builder.deploy import deploy
from runtime.bench.arrivals import closed_loop
from runtime.bench.driver import drive
from runtime.bench.triton_grpc import TritonGrpcClient
from runtime.bench.workload import Work
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.request import SamplingParams
from runtime.serving.server import TritonServer


def client(port: int, texts: list[str], max_tokens: int) -> dict[str, float]:
    """All prompts at once, one stream each, as `runtime bench` sends them. Returns seconds, tokens and responses."""
    streams = TritonGrpcClient(f"127.0.0.1:{port}", "llm", SamplingParams(ignore_eos=True))
    at_once = closed_loop(len(texts))
    drive(streams, [Work(text, 1) for text in texts], at_once)  # opens the connections
    records = drive(streams, [Work(text, max_tokens) for text in texts], at_once)
    streams.close()
    errors = [record.error for record in records if record.error]
    if errors:
        raise RuntimeError(errors[0])
    return {
        "seconds": max(record.moments[-1] for record in records) - records[0].sent,
        "tokens": sum(record.num_output_tokens for record in records),
        "responses": sum(len(record.moments) for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--stream-interval", default="auto", help="tokens in a response, or auto, as deployed; default: auto")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)  # port: be the client, read the work from standard input
    options = parser.parse_args()
    if options.client is not None:
        work = json.load(sys.stdin)
        print(json.dumps(client(options.client, work["texts"], work["max_tokens"])))
        return

    directory = chosen_engine(options).resolve()
    rates: dict[str, list[float]] = {"in_process": [], "triton": []}
    together: list[float] = []
    config = RuntimeConfig(enable_prefix_caching=False)
    with tempfile.TemporaryDirectory() as work, Engine.load(directory, config) as engine:
        ids = engine.tokenizer.encode(heldout_text())
        step = len(ids) // options.streams
        texts = [engine.tokenizer.decode(ids[i * step : i * step + options.prompt_tokens]) for i in range(options.streams)]
        prompts = [engine.tokenizer.encode(text) for text in texts]
        params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True)
        deploy(
            directory,
            Path(work) / "repository",
            "llm",
            options={"enable_kv_cache_reuse": "false", "stream_interval": options.stream_interval},
        )
        with TritonServer(Path(work) / "repository", log_file=Path(work) / "log") as server:
            for repetition in range(options.repetitions + 1):
                _, seconds = run_closed_loop(engine, prompts, params)
                job = json.dumps({"texts": texts, "max_tokens": options.output_tokens})
                done = subprocess.run(
                    [sys.executable, __file__, "--client", str(server.grpc_port)],
                    input=job,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                answer = json.loads(done.stdout.splitlines()[-1])
                total = options.streams * options.output_tokens
                if answer["tokens"] != total:
                    raise SystemExit(f"error: Triton delivered {answer['tokens']} tokens, not {total}")
                if repetition:  # the first warms both up
                    rates["in_process"].append(total / seconds)
                    rates["triton"].append(total / answer["seconds"])
                    together.append(answer["tokens"] / answer["responses"])
    ratios = [through / alone for through, alone in zip(rates["triton"], rates["in_process"], strict=True)]
    finish(
        "triton_overhead",
        **facts(directory),
        streams=options.streams,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        stream_interval=options.stream_interval,
        tokens_per_second={name: [round(rate, 1) for rate in values] for name, values in rates.items()},
        ratio={"median": round(median(ratios), 3), "all": [round(ratio, 3) for ratio in ratios]},
        tokens_per_response=round(median(together), 2),
    )


if __name__ == "__main__":
    main()
