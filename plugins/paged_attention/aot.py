"""Compile the kernels to cubins, with no GPU:  python -m plugins.paged_attention.aot --out DIR [--arch sm80,sm89] [--only TEXT]

The compiler's own report gives registers and spills; a kernel that spills, or needs more shared memory than the architecture has,
is not written and the command fails. Kernels already in DIR and built from the same sources by the same compiler are kept.
Needs triton (its wheel brings ptxas); writes what cubins.py reads. Exit status 1 when any kernel failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from plugins.paged_attention import cubins, matrix
from plugins.paged_attention.cubins import KernelBinary
from plugins.paged_attention.matrix import KernelSpec
from plugins.paged_attention.tuning import ARCHITECTURES, max_shared_bytes

SOURCES = ("plugins.paged_attention.kernels", "plugins.paged_attention.kv_write", "plugins.sampling.kernels")
_PTX_VERSION = 90  # from SM90 on: the newest a CUDA 13.0 driver knows; older architectures use their own ptxas's version
_HIDDEN_PARAMS = (("global_scratch", "*i8"), ("profile_scratch", "*i8"))  # added by the compiler after ours; 0 is passed


class KernelRejected(Exception):
    """A kernel that must not be shipped; the message says why."""


@lru_cache(maxsize=1)
def source_sha256() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def compiler() -> str:
    return f"triton {importlib.metadata.version('triton')}"


def parse_report(log: str) -> tuple[int, int]:
    """(registers per thread, spilled bytes stored and loaded) from ptxas -v."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if len(registers) != 1 or len(spills) != 1:
        raise KernelRejected(f"the compiler reported {len(registers)} kernels instead of one:\n{log}")
    return int(registers[0]), sum(map(int, spills[0]))


def compile_kernel(spec: KernelSpec, arch: int) -> KernelBinary:
    """Compiled once as the compiler likes; if that spills, again with all registers a block of this size can have.

    ptxas aims at round occupancies (128, 168 registers) and spills a few bytes to get there.
    """
    binary = _compile(spec, arch, None)
    if binary.spill_bytes:
        binary = _compile(spec, arch, min(255, 65536 // (32 * spec.num_warps)))
    return binary


def _compile(spec: KernelSpec, arch: int, max_registers: int | None) -> KernelBinary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set; unset it to compile kernels")
    module, _, function = spec.function.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    names = [name for name, _ in spec.params]
    source = ASTSource(
        fn=kernel,
        signature={**dict(spec.params), **{name: "constexpr" for name, _ in spec.constants}},
        constexprs=dict(spec.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.align},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    if arch >= 90:
        options["ptx_version"] = _PTX_VERSION
    if max_registers is not None:
        options["maxnreg"] = max_registers
    report = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        for knobs in (triton.knobs.nvidia, triton.knobs.cache, triton.knobs.compilation):
            stack.enter_context(knobs.scope())
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.cache.dir = cache
        triton.knobs.compilation.always_compile = True
        stack.enter_context(contextlib.redirect_stdout(report))
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin = compiled.asm["cubin"]
    metadata = compiled.metadata
    registers, spill_bytes = parse_report(report.getvalue())
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise KernelRejected(f"{spec.name} for sm{arch} wants scratch memory, which no launcher provides")
    return KernelBinary(
        name=spec.name,
        arch=arch,
        symbol=metadata.name,
        params=spec.params + _HIDDEN_PARAMS,
        constants=dict(spec.constants),
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        compiler=compiler(),
        source_sha256=source_sha256(),
        sha256=hashlib.sha256(cubin).hexdigest(),
        cubin=cubin,
        num_stages=spec.num_stages,
    )


def check(binary: KernelBinary) -> None:
    """Raises KernelRejected for spills or too much shared memory."""
    if binary.spill_bytes:
        raise KernelRejected(
            f"{binary.name} for sm{binary.arch} spills {binary.spill_bytes} bytes at {binary.registers} registers; "
            "choose smaller tiles or more warps in tuning.py"
        )
    limit = max_shared_bytes(binary.arch)
    if binary.shared_bytes > limit:
        raise KernelRejected(
            f"{binary.name} for sm{binary.arch} needs {binary.shared_bytes} bytes of shared memory of {limit}; "
            "choose smaller tiles or fewer stages in tuning.py"
        )


def build_one(spec: KernelSpec, arch: int, out: Path) -> str:
    """Compile, check and write; returns the table row, or raises KernelRejected."""
    started = time.perf_counter()
    try:
        binary = cubins.load(out, arch, spec.name)
        kept = binary.source_sha256, binary.compiler, binary.constants, binary.num_warps, binary.num_stages
        current = kept == (source_sha256(), compiler(), dict(spec.constants), spec.num_warps, spec.num_stages)
    except (FileNotFoundError, ValueError):
        current = False
    if not current:
        binary = compile_kernel(spec, arch)
        check(binary)
        cubins.save(binary, out)
    seconds = time.perf_counter() - started
    return (
        f"sm{arch:<4} {spec.name:<58} {binary.registers:>4} regs {binary.shared_bytes:>7} B shared "
        f"{binary.num_warps:>2} warps {len(binary.cubin):>7} B {seconds:5.1f} s"
    )


def _job(job: tuple[KernelSpec, int, Path]) -> tuple[bool, str]:
    try:
        return True, build_one(*job)
    except Exception as error:
        return False, f"sm{job[1]} {job[0].name}: {type(error).__name__}: {error}"


def build(jobs: list[tuple[KernelSpec, int]], out: Path, workers: int = 1) -> list[str]:
    """Compile all; prints a row each and returns the failures."""
    work = [(spec, arch, out) for spec, arch in jobs]
    failures = []
    with contextlib.ExitStack() as stack:
        if workers > 1:
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
            results = pool.map(_job, work)
        else:
            results = map(_job, work)
        for good, text in results:
            print(text, flush=True)
            if not good:
                failures.append(text)
    return failures


def parse_arch(text: str) -> list[int]:
    archs = [int(name.strip().lower().removeprefix("sm").removeprefix("_")) for name in text.split(",")]
    for arch in archs:
        if arch not in ARCHITECTURES:
            known = ", ".join(f"sm{known}" for known in ARCHITECTURES)
            raise argparse.ArgumentTypeError(f"sm{arch} is not one of {known}")
    return archs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m plugins.paged_attention.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for <arch>/<name>.cubin and .json")
    parser.add_argument("--arch", type=parse_arch, default=list(ARCHITECTURES), help="e.g. sm80,sm89 (default: all)")
    parser.add_argument("--only", default="", help="compile only kernels whose name contains this")
    parser.add_argument("--subset", choices=("shipped", "representative"), default="shipped", help="default: shipped")
    parser.add_argument("--block-size", type=int, action="append", help="tokens per block (default 64; repeatable)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    variants = matrix.shipped(tuple(args.block_size or (64,))) if args.subset == "shipped" else matrix.representative()
    jobs = [(spec, arch) for arch in args.arch for spec in matrix.for_variants(variants, arch) if args.only in spec.name]
    if not jobs:
        parser.error(f"no kernel has a name that contains {args.only!r}")
    started = time.perf_counter()
    failures = build(jobs, args.out, args.jobs)
    print(f"{len(jobs) - len(failures)} of {len(jobs)} kernels, {time.perf_counter() - started:.0f} s")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
