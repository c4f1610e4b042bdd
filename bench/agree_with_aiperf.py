"""Does `runtime bench` see the latencies that NVIDIA's aiperf sees? Both load the same Triton with the same prompts, in turn.

    python -m venv V && V/bin/pip install aiperf
    python bench/agree_with_aiperf.py --aiperf V/bin/aiperf [--engine DIR] [--request-rate 2]

Open loop at an even rate over HTTP generate_stream, EOS ignored, prefix cache off. The figures compared are means per request:
latency, TTFT, and aiperf's inter-token latency, which is our TPOT. Each ratio is ours over aiperf's; agreement is within 10 %.

What both must see alike:
    arrivals    in a closed loop of equal requests it is chance whether they end and start together, or a prompt joins others'
                decoding; that moves milliseconds between TTFT and inter-token latency. At an even rate both ask for the same
    chunks      aiperf overlooks a chunk without text, such as a special token's or half of a character's. It is told to read a
                letter in each chunk that holds a token, so that its first and last chunk are ours
    tokens      aiperf counts them by tokenizing the text again. Every request has --output-tokens of them, so the inter-token
                latency is made of its own two moments and that number: (latency − TTFT) / (tokens − 1)
    processor   aiperf is a dozen processes. The engine gets one thread, so that on two cores a load generator does not slow the
                server it measures; what is compared is clients, not engines
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import add_engine_options, chosen_engine, facts, finish, median, spread

from builder.deploy import deploy
from runtime.bench.workload import Lengths, Prompts, random_work
from runtime.contract import TOKENIZER_DIR, load_manifest
from runtime.serving.server import TritonServer
from runtime.tokenizer import Tokenizer

COMPARED = {"request_latency": "mean_e2el_ms", "time_to_first_token": "mean_ttft_ms", "inter_token_latency": "mean_tpot_ms"}
LIMIT = 0.10
HOLDS_A_TOKEN = "num_output_tokens > `0` && 'x'"  # JMESPath, of a response


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")


def ours(url: str, engine: Path, work: Path, options: argparse.Namespace) -> dict[str, float]:
    report, trace = work / "ours.json", work / "ours.jsonl"
    run(
        [
            sys.executable, "-m", "runtime.cli", "bench", str(engine), "--url", f"http://{url}", "--dataset", str(trace),
            "--num-prompts", str(options.requests), "--request-rate", str(options.request_rate), "--burstiness", "10000",
            "--warmup", "2", "--quiet",
            "--json", str(report),
        ]
    )  # fmt: skip
    figures: dict[str, Any] = json.loads(report.read_text())["figures"]
    return {name: figures[key] for name, key in COMPARED.items()}


def theirs(url: str, engine: Path, work: Path, options: argparse.Namespace) -> dict[str, float]:
    values = {
        "max_tokens": options.output_tokens, "stream": True, "ignore_eos": True, "exclude_input_in_output": True,
        "return_num_output_tokens": True,
    }  # fmt: skip
    template = work / "payload.jinja"  # a file: aiperf cuts a template on the command line at its commas
    template.write_text('{"text_input": {{ text|tojson }}, ' + json.dumps(values)[1:])
    run(
        [
            str(options.aiperf), "profile", "--model", "llm", "--url", f"http://{url}", "--endpoint-type", "template",
            "--custom-endpoint", "/v2/models/llm/generate_stream", "--streaming",
            "--extra-inputs", f"payload_template:{template}", "--extra-inputs", f"response_field:{HOLDS_A_TOKEN}",
            "--tokenizer", str(engine / TOKENIZER_DIR), "--input-file", str(work / "theirs.jsonl"),
            "--custom-dataset-type", "single_turn", "--request-count", str(options.requests),
            "--request-rate", str(options.request_rate), "--arrival-pattern", "constant",
            "--warmup-request-count", "2", "--artifact-dir", str(work / "aiperf"),
            "--ui", "none", "--workers-max", "1", "--record-processors", "1", "--no-gpu-telemetry", "--no-server-metrics",
        ]
    )  # fmt: skip
    metrics = json.loads((work / "aiperf" / "profile_export_aiperf.json").read_text())
    latency, ttft = metrics["request_latency"]["avg"], metrics["time_to_first_token"]["avg"]
    return {
        "request_latency": latency,
        "time_to_first_token": ttft,
        "inter_token_latency": (latency - ttft) / (options.output_tokens - 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--aiperf", type=Path, required=True, help="its executable")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--request-rate", type=float, default=2.0, help="per second; the server must keep up with it")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args(argv)

    engine = chosen_engine(options).resolve()
    tokenizer = Tokenizer.load(engine / TOKENIZER_DIR)
    vocab = load_manifest(engine, verify_checksums=False).model.vocab_size
    prompts = Prompts(vocab_size=vocab, tokenizer=tokenizer, as_text=True)
    lengths = Lengths.parse(str(options.prompt_tokens)), Lengths.parse(str(options.output_tokens))
    works = random_work(prompts, options.requests, *lengths)
    seen: dict[str, dict[str, list[float]]] = {name: {"ours": [], "aiperf": []} for name in COMPARED}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "ours.jsonl").write_text(
            "".join(json.dumps({"text_input": each.prompt, "output_length": each.max_tokens}) + "\n" for each in works)
        )
        (work / "theirs.jsonl").write_text("".join(json.dumps({"text": each.prompt}) + "\n" for each in works))
        deploy(engine, work / "repository", "llm", options={"enable_kv_cache_reuse": "false", "num_threads": "1"})
        with TritonServer(work / "repository", log_file=work / "log") as server:
            for _ in range(options.repetitions):
                for name, figures in (("ours", ours), ("aiperf", theirs)):
                    for metric, value in figures(server.http_url, engine, work, options).items():
                        seen[metric][name].append(value)
    ratios = {metric: median(values["ours"]) / median(values["aiperf"]) for metric, values in seen.items()}
    finish(
        "agree_with_aiperf",
        **facts(engine),
        requests=options.requests,
        request_rate=options.request_rate,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        mean_ms={metric: {name: spread(each, 3) for name, each in values.items()} for metric, values in seen.items()},
        ratio={metric: round(ratio, 4) for metric, ratio in ratios.items()},
        agrees=all(abs(ratio - 1) <= LIMIT for ratio in ratios.values()),
    )


if __name__ == "__main__":
    main()
