"""`runtime generate | serve | doctor | bench`: use an engine from the shell."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime import __version__
from runtime.bench.cli import HELP, add_options
from runtime.errors import ForgelineError, InvalidRequest, sentence


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="runtime", description="Run and serve Forgeline engines.")
    main.add_argument("--version", action="version", version=f"forgeline {__version__}")
    commands = main.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="complete prompts in this process, without a server")
    generate.add_argument("engine", type=Path, help="the directory that `builder build` wrote")
    generate.add_argument("--prompt", action="append", required=True, help="repeat for several prompts in one batch")
    generate.add_argument("--chat", action="store_true", help="wrap each prompt as a user message in the chat template")
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default 64")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0: off")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: off")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default 0: off")
    generate.add_argument("--seed", type=int, metavar="S", help="the same text for the same seed; default: another each time")
    generate.add_argument("--stop", action="append", default=[], help="stop string; repeat for several")
    generate.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt instead of text")
    _engine_options(generate)

    serve = commands.add_parser("serve", help="start and supervise Triton Inference Server on a model repository")
    serve.add_argument("--repository", type=Path, required=True, help="holds what `builder deploy` wrote")
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only; 0.0.0.0: everywhere")
    serve.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="default 8000; 0: any free one")
    serve.add_argument("--grpc-port", type=int, default=8001, metavar="PORT", help="default 8001; 0: any free one")
    serve.add_argument("--metrics-port", type=int, default=8002, metavar="PORT", help="default 8002; 0: any free one")
    serve.add_argument("--log-file", type=Path, help="Triton's log; default: standard error")
    serve.add_argument(
        "--drain-timeout", type=float, default=5.0, metavar="SECONDS",
        help="when stopping, requests in flight may finish for so long, then they end with an error; default 5",
    )  # fmt: skip

    doctor = commands.add_parser("doctor", help="say what is on this machine and what will work on it")
    doctor.add_argument("engine", type=Path, nargs="?", help="also say whether this engine loads here")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")

    bench = commands.add_parser("bench", help=HELP, description=HELP[0].upper() + HELP[1:] + ".")
    add_options(bench)
    _engine_options(bench)
    return main


def _engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a runtime option, e.g. num_threads=2")


def _options(pairs: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--set {pair!r} must have the form NAME=VALUE")
        options[name] = value
    return options


def generate(arguments: argparse.Namespace) -> int:
    from runtime.config import from_strings
    from runtime.engine import Engine
    from runtime.llm import LLM
    from runtime.request import SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    with LLM.from_engine(Engine.load(arguments.engine, from_strings(_options(arguments.set)))) as llm:
        if len(arguments.prompt) == 1 and not arguments.json:
            for output in llm.stream(llm.encode(arguments.prompt[0], chat=arguments.chat), params):
                print(output.text, end="", flush=True)
            print()
            return 0
        prompts = [llm.encode(prompt, chat=arguments.chat) for prompt in arguments.prompt]
        for prompt, completion in zip(arguments.prompt, llm.generate(prompts, params), strict=True):
            if arguments.json:
                times = completion.timings
                record = {
                    "prompt": prompt,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason.value,
                    "num_prompt_tokens": completion.num_prompt_tokens,
                    "queue_ms": round(times.queue_ms(), 3),
                    "prefill_ms": round(times.prefill_ms(), 3),
                    "decode_ms": round(times.decode_ms(), 3),
                    "ttft_ms": round(times.ttft_ms(), 3),
                }
                print(json.dumps(record, ensure_ascii=False))
            else:
                print(f"--- {prompt}\n{completion.text}")
    return 0


def serve(arguments: argparse.Namespace) -> int:
    from runtime.serving.serve import serve_main

    return serve_main(
        arguments.repository,
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        log_file=arguments.log_file,
        drain_timeout_s=arguments.drain_timeout,
    )


def doctor(arguments: argparse.Namespace) -> int:
    from runtime.doctor import doctor as report

    return report(arguments.engine, as_json=arguments.json)


def bench(arguments: argparse.Namespace) -> int:
    from runtime.bench.cli import run

    return run(arguments, _options(arguments.set))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text the terminal's encoding lacks
    try:
        return {"generate": generate, "serve": serve, "doctor": doctor, "bench": bench}[arguments.command](arguments)
    except (ForgelineError, PermissionError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `runtime generate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
