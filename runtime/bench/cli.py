"""`runtime bench`: its options, and how they become a run. Everything else is imported when the command runs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from runtime.bench.arrivals import Arrivals
    from runtime.bench.workload import Prompts, Work
    from runtime.contract import Manifest
    from runtime.request import SamplingParams
    from runtime.tokenizer import Tokenizer

HELP = "load an engine, or a running Triton, and measure latency, throughput, goodput, stages and roofline"


def add_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("engine", type=Path, nargs="?", help="engine directory; with --url only its tokenizer is used")
    bench.add_argument(
        "--url", help="a running Triton: grpc://HOST:PORT or http://HOST:PORT; default: the engine in this process"
    )
    bench.add_argument("--model", default="llm", help="name of the model on that server")

    work = bench.add_argument_group("workload")
    work.add_argument("--num-prompts", "--num-requests", type=int, default=64, help="requests of the run; default: 64")
    work.add_argument(
        "--input-len",
        default="128",
        metavar="LENGTH",
        help="N, uniform:min=,max=, normal:mean=,std=, lognormal:median=,sigma=; default: 128",
    )
    work.add_argument("--output-len", default="64", metavar="LENGTH", help="as --input-len; default: 64")
    work.add_argument("--shared-prefix-len", type=int, default=0, help="first tokens that all prompts share")
    work.add_argument("--dataset", type=Path, metavar="JSONL", help="requests from a file instead (docs/benchmarking.md)")
    work.add_argument("--prompts", choices=("ids", "text"), help="default: ids in this process, text through Triton")
    work.add_argument("--seed", type=int, default=0, help="of prompts, lengths, arrivals and sampling; default: 0")
    work.add_argument(
        "--warmup", type=int, default=2, help="requests that are not counted; default: 2 (--knee: a batch for each)"
    )

    load = bench.add_argument_group("arrivals", "default: all at once")
    load.add_argument(
        "--concurrency", "--max-concurrency", type=int, help="requests in flight: a closed loop, or a limit on an open one"
    )
    load.add_argument("--request-rate", type=float, help="open loop, requests per second")
    load.add_argument("--burstiness", type=float, default=1.0, help="shape of the gamma gaps: 1 Poisson, below 1 bursts")
    load.add_argument("--replay", action="store_true", help="open loop at the timestamps of --dataset")
    load.add_argument("--speed", type=float, default=1.0, help="replay faster by this factor")

    sampling = bench.add_argument_group("sampling")
    sampling.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="go on to the output length; default: yes"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, help="default 0: off")
    sampling.add_argument("--top-p", type=float, default=1.0, help="default 1: off")

    judge = bench.add_argument_group("judging")
    judge.add_argument(
        "--slo", "--goodput", metavar="ttft=MS,tpot=MS", help="also itl, e2el; goodput counts requests within all limits"
    )
    judge.add_argument(
        "--knee", action="store_true", help="run concurrency 1, 2, 4, … and write the knee into the engine's manifest"
    )
    judge.add_argument("--no-write", action="store_true", help="with --knee: print it only")
    judge.add_argument(
        "--roofline", action=argparse.BooleanOptionalAction, default=True, help="share of what the machine can do; default: yes"
    )
    judge.add_argument("--measure-machine", action="store_true", help="measure the machine's peaks again")

    output = bench.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="the whole report")
    output.add_argument("--csv", type=Path, metavar="FILE", help="one line per request")
    output.add_argument("--plot", type=Path, metavar="PNG", help="needs the bench extra")
    output.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace, options: Mapping[str, str]) -> int:
    """0 when every request succeeded, 1 when some failed.  Raises  ForgelineError"""
    from runtime.bench import plots
    from runtime.bench.statistics import parse_slo

    if arguments.engine is None and arguments.url is None:
        raise InvalidRequest("name an engine directory, or a running server with --url")
    if arguments.url is not None and options:
        raise InvalidRequest("--set is for an engine in this process; set the server's options with `builder deploy`")
    if arguments.knee and (arguments.url is not None or arguments.dataset or arguments.request_rate):
        raise InvalidRequest(
            "--knee runs closed loops of random prompts in this process; leave out --url, --dataset, --request-rate"
        )
    if arguments.num_prompts < 1 or arguments.warmup < 0:
        raise InvalidRequest("--num-prompts must be at least 1 and --warmup at least 0")
    if arguments.plot is not None:
        plots.require()
    slo = parse_slo(arguments.slo) if arguments.slo else {}
    if arguments.url is not None:
        return _remote(arguments, slo)
    return _in_process(arguments, options, slo)


def _params(arguments: argparse.Namespace) -> SamplingParams:
    from runtime.request import SamplingParams

    seed = arguments.seed if arguments.temperature > 0 else None
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=seed,
        ignore_eos=arguments.ignore_eos,
    )


def _in_process(arguments: argparse.Namespace, options: Mapping[str, str], slo: dict[str, float]) -> int:
    from runtime.bench import machine, session
    from runtime.bench.clients import InProcessClient
    from runtime.bench.driver import Progress
    from runtime.config import from_strings
    from runtime.contract import load_manifest
    from runtime.engine import Engine

    config = from_strings(dict(options))
    manifest = load_manifest(arguments.engine, verify_checksums=False)
    if arguments.knee and config.max_num_seqs is None:
        config = dataclasses.replace(config, max_num_seqs=manifest.max_num_seqs)  # not the knee of an earlier run
    peaks = None
    if (arguments.roofline and not arguments.knee and manifest.target == "cpu") or arguments.measure_machine:
        peaks = machine.peaks(again=arguments.measure_machine)
    with Engine.load(arguments.engine, config) as engine:
        params = _params(arguments)
        settings = _settings(arguments, manifest) | {"options": _resolved(engine.config)}
        prompts = _prompts(arguments, manifest, engine.tokenizer, as_text=arguments.prompts == "text", seed=arguments.seed)
        works = _works(arguments, prompts)
        _check_lengths(works, engine.config.max_model_len)
        arrivals = _arrivals(arguments, works)
        warm = _prompts(arguments, manifest, engine.tokenizer, as_text=arguments.prompts == "text", seed=~arguments.seed)
        session.warm_up(InProcessClient(engine, params), _random_works(arguments, warm, arguments.warmup))
        if arguments.knee:
            return _knee(arguments, engine, prompts, params, slo, settings)
        progress = Progress(len(works), "requests", quiet=arguments.quiet)
        done = session.run_engine(
            engine, works, arrivals, params, slo=slo, progress=progress, directory=arguments.engine, peaks=peaks
        )
    return _finish(arguments, done, settings | _of_arrivals(arrivals, works), slo)


def _remote(arguments: argparse.Namespace, slo: dict[str, float]) -> int:
    from runtime.bench import session
    from runtime.bench.clients import connect
    from runtime.bench.driver import Progress
    from runtime.contract import TOKENIZER_DIR, load_manifest
    from runtime.tokenizer import Tokenizer

    if arguments.prompts == "ids":
        raise InvalidRequest("Triton's text_input takes text; leave out --prompts ids")
    if arguments.engine is None and arguments.dataset is None:
        raise InvalidRequest(
            "random text needs the model's tokenizer; name the engine that the server runs, or a --dataset of prompts"
        )
    manifest = tokenizer = None
    if arguments.engine is not None:
        manifest = load_manifest(arguments.engine, verify_checksums=False)
        tokenizer = Tokenizer.load(arguments.engine / TOKENIZER_DIR)
    params = _params(arguments)
    client = connect(arguments.url, arguments.model, params)
    try:
        settings = _settings(arguments, manifest) | {"server": getattr(client, "server", {})}
        if manifest is not None and tokenizer is not None:
            warm = _prompts(arguments, manifest, tokenizer, as_text=True, seed=~arguments.seed)
            session.warm_up(client, _random_works(arguments, warm, arguments.warmup))
        prompts = _prompts(arguments, manifest, tokenizer, as_text=tokenizer is not None, seed=arguments.seed)
        works = _works(arguments, prompts)
        arrivals = _arrivals(arguments, works)
        progress = Progress(len(works), "requests", quiet=arguments.quiet)
        done = session.run_client(client, works, arrivals, slo=slo, progress=progress)
    finally:
        client.close()
    return _finish(arguments, done, settings | _of_arrivals(arrivals, works), slo)


def _knee(arguments: argparse.Namespace, engine: Any, prompts: Prompts, params: SamplingParams, slo: dict[str, float], settings: dict[str, Any]) -> int:  # fmt: skip  # noqa: E501
    from runtime.bench import knee, plots, report, session
    from runtime.bench.clients import InProcessClient
    from runtime.bench.driver import Progress
    from runtime.bench.environment import environment

    points = []
    for concurrency in knee.concurrencies(engine.config.max_num_seqs):
        works = _random_works(arguments, prompts, max(arguments.num_prompts, 2 * concurrency))
        _check_lengths(works, engine.config.max_model_len)
        if arguments.warmup:  # kernels are generated for the numbers of tokens that steps of this concurrency have
            session.warm_up(InProcessClient(engine, params), _random_works(arguments, prompts, concurrency))
        progress = Progress(len(works), f"{concurrency} in flight", quiet=arguments.quiet)
        points.append(session.measure_point(engine, works, concurrency, params, progress))
    found = knee.find(points, slo)
    print(report.knee_text(points, found, slo))
    where = environment()
    about = {"machine": where["machine"]["name"], "date": where["date"], "configuration": settings}
    if not arguments.no_write:
        knee.write(arguments.engine, found, points, slo=slo, about=about)
    if arguments.json is not None:
        curve = [dataclasses.asdict(point) for point in points]
        report.write_json(arguments.json, {**where, "configuration": settings, "slo_ms": slo, "knee": dataclasses.asdict(found), "curve": curve})  # fmt: skip  # noqa: E501
    if arguments.plot is not None:
        plots.plot_knee(points, found, settings["model"], arguments.plot)
    return 0


def _prompts(
    arguments: argparse.Namespace, manifest: Manifest | None, tokenizer: Tokenizer | None, *, as_text: bool, seed: int
) -> Prompts:
    from runtime.bench.workload import Prompts

    vocab_size = manifest.model.vocab_size if manifest is not None else 1
    shared = arguments.shared_prefix_len
    return Prompts(vocab_size=vocab_size, tokenizer=tokenizer, as_text=as_text, shared=shared, seed=seed)


def _random_works(arguments: argparse.Namespace, prompts: Prompts, count: int) -> list[Work]:
    from runtime.bench.workload import Lengths, random_work

    inputs, outputs = Lengths.parse(arguments.input_len), Lengths.parse(arguments.output_len)
    return random_work(prompts, count, inputs, outputs, seed=arguments.seed)


def _works(arguments: argparse.Namespace, prompts: Prompts) -> list[Work]:
    from runtime.bench.workload import Lengths, read_trace

    if arguments.dataset is None:
        return _random_works(arguments, prompts, arguments.num_prompts)
    output = Lengths.parse(arguments.output_len)
    return read_trace(arguments.dataset, prompts, default_output=output, seed=arguments.seed, limit=arguments.num_prompts)


def _arrivals(arguments: argparse.Namespace, works: list[Work]) -> Arrivals:
    from runtime.bench.arrivals import closed_loop, open_loop, replay

    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise InvalidRequest(f"--concurrency is {arguments.concurrency} but must be at least 1")
    if arguments.replay:
        if arguments.dataset is None or arguments.request_rate is not None:
            raise InvalidRequest("--replay takes its moments from a --dataset with timestamps, without --request-rate")
        return replay([work.timestamp for work in works], speed=arguments.speed, concurrency=arguments.concurrency)
    if arguments.request_rate is not None:
        return open_loop(
            len(works),
            arguments.request_rate,
            burstiness=arguments.burstiness,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
        )
    return closed_loop(arguments.concurrency or len(works))


def _check_lengths(works: list[Work], max_model_len: int) -> None:
    for index, work in enumerate(works):
        if isinstance(work.prompt, list) and len(work.prompt) + work.max_tokens > max_model_len:
            raise InvalidRequest(
                f"request {index} asks for {len(work.prompt)} prompt and {work.max_tokens} output tokens but max_model_len is "
                f"{max_model_len}; lower --input-len or --output-len, or give them a max="
            )


def _settings(arguments: argparse.Namespace, manifest: Manifest | None) -> dict[str, Any]:
    """What has to be known to repeat the run."""
    engine = {}
    if manifest is not None:
        cache = manifest.kv_cache
        engine = {
            "model": manifest.model.name,
            "target": manifest.target,
            "precision": manifest.precision.name,
            "kv_cache": f"{cache.key_dtype}:{cache.value_dtype}",
            "engine_libraries": manifest.libraries,
        }
    source = {"dataset": str(arguments.dataset)} if arguments.dataset else {"input_len": arguments.input_len}
    return {
        "client": "in process" if arguments.url is None else arguments.url,
        **engine,
        **source,
        "output_len": arguments.output_len,
        "shared_prefix_len": arguments.shared_prefix_len,
        "prompts": arguments.prompts or ("ids" if arguments.url is None else "text"),
        "eos_ignored": arguments.ignore_eos,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "warmup": arguments.warmup,
    }


def _of_arrivals(arrivals: Arrivals, works: list[Work]) -> dict[str, Any]:
    return {
        "num_prompts": len(works),
        "arrivals": arrivals.kind,
        "concurrency": arrivals.concurrency,
        "request_rate": arrivals.rate,
        "burstiness": arrivals.burstiness,
    }


def _resolved(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def _finish(arguments: argparse.Namespace, done: Any, settings: dict[str, Any], slo: dict[str, float]) -> int:
    from runtime.bench import plots, report
    from runtime.bench.environment import environment

    content = {"benchmark": "runtime bench", **environment(), "configuration": settings, "slo_ms": slo, **done.sections}
    print(report.text(content, done.records))
    if arguments.json is not None:
        report.write_json(arguments.json, content)
    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            report.write_csv(file, done.records)
    if arguments.plot is not None:
        plots.plot_run(done.records, settings.get("model", arguments.model), arguments.plot)
    failed = done.sections["figures"]["failed"]
    if failed:
        print(f"{failed} requests failed", file=sys.stderr)
    return 1 if failed else 0
