"""Our engine beside every peer that can run the same weights on this CPU: one table, with versions, commands, medians and spread.

    python bench/peers/compare.py --model llama-1b --precision int4 --threads 2
    python bench/peers/compare.py --model smollm2-135m-instruct --precision int8 --peers openvino-genai,transformers
    python bench/peers/compare.py --compute-dtype f32,bf16      # two engines of ours, as two rows

Each peer is installed into an environment of its own under --work and converts the same Hugging Face directory there, once; this
takes from minutes to half an hour (llama.cpp is compiled). Then every repetition starts each of them in turn, in a fresh process
with nothing else running, so that the machine's drift falls on all alike. A peer that cannot be installed or run is named with
its reason and the table has the others. Not part of CI: it needs a quiet machine. The figures are tokens per second, greedy, EOS
ignored, sampling included; see protocol.py for what is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import RECIPES, Recipe
from shapes import SHAPES, hugging_face_directory, vocab_size

from builder.build import build
from builder.config import COMPUTE_DTYPES, BuildConfig
from runtime.bench.environment import environment

HERE = Path(__file__).resolve().parent
OURS = "forgeline"


class Failed(Exception):
    """A peer cannot take part; the message is the reason."""


@dataclass
class Contestant:
    name: str
    precision: str  # what it runs
    python: Path
    script: Path
    model: Path
    threads: int
    new_tokens: int
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    commands: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    mine: bool = False


def run(command: Sequence[str], log: Path) -> None:
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ {shlex.join(command)}", file=file, flush=True)
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise Failed(f"`{shlex.join(command)}` ended with {done.returncode}; see {log}")


def prepare(recipe: Recipe, hf: Path, options: argparse.Namespace) -> Contestant:
    """Install and convert, each once; a marker file says that it is done."""
    place: Path = options.work / recipe.name
    place.mkdir(parents=True, exist_ok=True)
    log, venv, source = place / "log.txt", place / "venv", place / "source"
    python = venv / "bin" / "python"
    precision, converting = recipe.convert[options.precision]
    out = place / f"{hf.name}-{options.precision}"
    names: dict[str, object] = {"python": python, "bin": venv / "bin", "hf": hf, "out": out, "here": HERE, "source": source}
    names["jobs"] = options.jobs
    building, expanded = (
        [[part.format(**names) for part in command] for command in commands] for commands in (recipe.build, converting)
    )
    contestant = Contestant(
        recipe.name, precision, python, HERE / recipe.script, out, options.threads,
        min(options.new_tokens, recipe.new_tokens or options.new_tokens), recipe.environment, recipe.remarks,
    )  # fmt: skip
    contestant.commands = [
        f"pip install {shlex.join(recipe.packages)}",
        *(shlex.join(command) for command in (*building, *expanded)),
    ]
    if not (place / "installed").exists():
        print(f"{recipe.name}: installing, log in {log}", file=sys.stderr)
        shutil.rmtree(venv, ignore_errors=True)
        source.mkdir(exist_ok=True)
        run([options.python, "-m", "venv", str(venv)], log)
        run([str(python), "-m", "pip", "install", "-q", *recipe.packages], log)
        if recipe.uninstall:
            run([str(python), "-m", "pip", "uninstall", "-q", "-y", *recipe.uninstall], log)
        for command in building:
            run(command, log)
        (place / "installed").touch()
    done = place / f"{out.name}.converted"
    if not done.exists():
        print(f"{recipe.name}: converting to {precision}", file=sys.stderr)
        if out.is_symlink() or out.is_file():
            out.unlink()
        shutil.rmtree(out, ignore_errors=True)
        for command in expanded:
            run(command, log)
        done.touch()
    return contestant


def ours(hf: Path, compute_dtype: str, options: argparse.Namespace) -> Contestant:
    """Built from the same directory as the peers' models, and again when our code has changed since."""
    suffix = "" if compute_dtype == "f32" else f"-{compute_dtype}"
    engine: Path = options.engine or options.work / OURS / f"{hf.name}-{options.precision}{suffix}"
    # What random weights are rounded to changes no speed, so GPTQ has nothing to gain. The exported graph is 4 GB: not kept.
    config = BuildConfig(str(hf), engine, precision=options.precision, compute_dtype=compute_dtype, eval_tokens=0)
    if hf.name in SHAPES:
        config = dataclasses.replace(config, calibration_samples=0, use_cache=False)
    if options.engine is None:
        build(config)
    contestant = Contestant(
        OURS + suffix, options.precision, Path(sys.executable), HERE / "run_forgeline.py", engine, options.threads,
        options.new_tokens, mine=True,
    )  # fmt: skip
    command = ["builder", "build", str(hf), "--precision", options.precision, "--output", str(engine), "--eval-tokens", "0"]
    if suffix:
        command += ["--compute-dtype", compute_dtype]
    if hf.name in SHAPES:
        command += ["--calibration-samples", "0", "--no-cache"]
    contestant.commands = [shlex.join(command)]
    return contestant


def measure(contestant: Contestant, vocab: int, options: argparse.Namespace, seed: int) -> None:
    command = [
        str(contestant.python), str(contestant.script), str(contestant.model), "--threads", str(contestant.threads),
        "--vocab-size", str(vocab), "--prefill", str(options.prefill), "--context", str(options.context),
        "--batches", options.batches, "--new-tokens", str(contestant.new_tokens), "--seed", str(seed),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(contestant.threads), "PYTHONPATH": str(HERE), **contestant.environment}
    if contestant.mine:
        environment["PYTHONPATH"] = f"{HERE}{os.pathsep}{HERE.parents[1]}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.timeout, env=environment)
    except subprocess.TimeoutExpired:
        raise Failed(f"it took more than {options.timeout} s; raise --timeout or lower --batches") from None
    if done.returncode:
        raise Failed(f"`{shlex.join(command)}` ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    contestant.runs.append(json.loads(done.stdout.strip().splitlines()[-1]))


def points(contestant: Contestant, batches: Sequence[str]) -> dict[str, list[float]]:
    """Tokens per second of each repetition, by point of measurement; points a peer cannot do are left out."""
    found = {"prefill": [run["prefill"] for run in contestant.runs]}
    for batch in batches:
        values = [run["decode"][batch] for run in contestant.runs if batch in run["decode"]]
        if values:
            found[f"B={batch}"] = values
    return found


def table(contestants: Sequence[Contestant], batches: Sequence[str]) -> str:
    columns = ["prefill", *(f"B={batch}" for batch in batches)]
    mine = [points(contestant, batches) for contestant in contestants if contestant.mine]
    lines = ["| tok/s | precision | threads | " + " | ".join(columns) + " |", "|---|---|---|" + "---|" * len(columns)]
    for contestant in contestants:
        found = points(contestant, batches)
        cells = []
        for column in columns:
            if column not in found:
                cells.append("–")
                continue
            middle, low, high = statistics.median(found[column]), min(found[column]), max(found[column])
            cell = f"{middle:.1f} ({low:.1f}–{high:.1f})"
            ratios = [f"{statistics.median(each[column]) / middle:.2f}×" for each in mine if column in each]
            if ratios and not contestant.mine:
                cell += f", ours {' and '.join(ratios)}"
            cells.append(cell)
        lines.append(f"| {contestant.name} | {contestant.precision} | {contestant.threads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(
    contestants: Sequence[Contestant], failures: dict[str, str], options: argparse.Namespace, batches: Sequence[str]
) -> str:
    about = environment()
    lines = [
        f"# {Path(options.model).name}, {options.precision}, {options.threads} threads",
        "",
        f"{about['machine']['name']}; {about['date']}; load average at the end {about['machine']['load_average']}. Medians of "
        f"{options.repetitions} interleaved runs (lowest–highest). Prompt {options.prefill}; decode of {options.new_tokens - 1} "
        f"tokens after a context of {options.context}; greedy, EOS ignored, sampling included.",
        "",
        table(contestants, batches),
        "",
    ]
    lines += [f"* {name} is missing: {reason}" for name, reason in failures.items()]
    for contestant in contestants:
        versions = ", ".join(f"{name} {version}" for name, version in contestant.runs[-1]["versions"].items())
        remarks = list(contestant.remarks)
        if contestant.new_tokens != options.new_tokens:
            remarks.append(f"decode of {contestant.new_tokens - 1} tokens")
        lines.append(f"* {contestant.name}: {'; '.join([versions, *remarks])}")
        lines += [f"    `{command}`" for command in contestant.commands]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama-1b", help="llama-1b (random weights), what `builder build` takes, or a directory"
    )
    parser.add_argument("--precision", choices=("int4", "int8"), default="int4")
    parser.add_argument("--compute-dtype", default="f32", help="of ours: f32, bf16 or both, separated by a comma")
    parser.add_argument("--engine", type=Path, help="our engine of that model, when it is built already")
    parser.add_argument("--peers", default=",".join(recipe.name for recipe in RECIPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile llama.cpp")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one peer's run")
    parser.add_argument("--work", type=Path, default=HERE.parent / "out" / "peers", help="environments and converted models")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that environments are made with")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--output", type=Path, help="default: WORK/MODEL-PRECISION.md, and .json beside it")
    options = parser.parse_args(argv)
    options.work = options.work.resolve()
    wanted = options.peers.split(",") if options.peers else []
    unknown = set(wanted) - {recipe.name for recipe in RECIPES}
    compute_dtypes = options.compute_dtype.split(",")
    if not set(compute_dtypes) <= set(COMPUTE_DTYPES) or len(compute_dtypes) > len(set(compute_dtypes)):
        raise SystemExit(f"error: --compute-dtype is {options.compute_dtype!r} but must be f32, bf16 or f32,bf16")
    if options.engine and len(compute_dtypes) > 1:
        raise SystemExit("error: --engine is one engine, but --compute-dtype asks for two; leave one of them out")
    if unknown:
        raise SystemExit(f"error: unknown peers {', '.join(sorted(unknown))}; known are {', '.join(r.name for r in RECIPES)}")

    options.work.mkdir(parents=True, exist_ok=True)
    hf = hugging_face_directory(options.model, options.work)
    failures: dict[str, str] = {}
    contestants = [ours(hf, dtype, options) for dtype in compute_dtypes]
    for recipe in RECIPES:
        if recipe.name in wanted:
            try:
                contestants.append(prepare(recipe, hf, options))
            except Failed as failure:
                failures[recipe.name] = str(failure)
                print(f"{recipe.name}: {failure}", file=sys.stderr)
    if options.install_only:
        return
    for repetition in range(options.repetitions):
        for contestant in [each for each in contestants if each.name not in failures]:
            print(f"repetition {repetition + 1}: {contestant.name}", file=sys.stderr)
            try:
                measure(contestant, vocab_size(hf), options, seed=repetition)
            except Failed as failure:
                failures[contestant.name] = str(failure)
                print(f"{contestant.name}: {failure}", file=sys.stderr)
    for contestant in contestants:
        if contestant.mine and contestant.name in failures:
            raise SystemExit(f"error: {failures[contestant.name]}")
    taking_part = [each for each in contestants if each.runs and each.name not in failures]
    text = report(taking_part, failures, options, options.batches.split(","))
    output = options.output or options.work / f"{hf.name}-{options.precision}.md"
    output.write_text(text, encoding="utf-8")
    data = {each.name: {"precision": each.precision, "commands": each.commands, "runs": each.runs} for each in taking_part}
    output.with_suffix(".json").write_text(json.dumps({**environment(), "failures": failures, "peers": data}, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
