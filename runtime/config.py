"""The operator's choices. Facts about the engine are in the manifest; `resolve` puts the two together once.

Precedence   defaults < manifest < explicit value. "auto" (None) does not survive `resolve`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.contract import Manifest
from runtime.errors import InvalidRequest, ManifestMismatch
from runtime.memory import BesidePool, of_engine

SCHEDULING_POLICIES = ("continuous", "static")
# Whole numbers of RuntimeConfig: (least, None allowed). A sequence is a prompt token and an output token at least.
_WHOLE = {
    "max_num_seqs": (1, True), "max_num_batched_tokens": (1, True), "max_model_len": (2, True),
    "memory_bytes": (1, True), "kv_cache_memory_bytes": (1, True),
    "num_blocks": (1, True), "num_threads": (1, True), "max_queue_size": (1, False),
}  # fmt: skip


@dataclass(frozen=True)
class RuntimeConfig:
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    memory_bytes: int | None = None  # CPU target: what the whole process may have resident; the KV cache gets what is left
    kv_cache_memory_bytes: int | None = None  # None: from kv_cache_memory_fraction of free memory, capped at what can be used
    kv_cache_memory_fraction: float = 0.5
    num_blocks: int | None = None  # overrides both of the above
    max_queue_size: int = 4096  # requests waiting or running
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_itl_stretch: float = math.inf  # how many times longer prompts may make a step in which sequences decode
    scheduling_policy: str = "continuous"
    num_threads: int | None = None
    verify_checksums: bool = True

    def __post_init__(self) -> None:
        for name, (least, optional) in _WHOLE.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidRequest(f"{name} is {value!r} but must be a whole number of at least {least}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "verify_checksums"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r} but must be True or False")
        fraction = self.kv_cache_memory_fraction
        if not isinstance(fraction, (int, float)) or isinstance(fraction, bool) or not 0 < fraction <= 1:
            raise InvalidRequest(f"kv_cache_memory_fraction is {fraction!r} but must be in (0, 1]")
        stretch = self.max_itl_stretch
        if not isinstance(stretch, (int, float)) or isinstance(stretch, bool) or not stretch > 1:
            raise InvalidRequest(f"max_itl_stretch is {stretch!r} but must be a number above 1; inf is without limit")
        if stretch < math.inf and not self.enable_chunked_prefill:
            raise InvalidRequest(
                f"max_itl_stretch={stretch:g} needs prompts in parts; leave enable_chunked_prefill on, or set max_itl_stretch=inf"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise InvalidRequest(
                f"scheduling_policy is {self.scheduling_policy!r} but must be one of {', '.join(SCHEDULING_POLICIES)}"
            )


@dataclass(frozen=True)
class ResolvedConfig:
    """Every number the runtime uses, no "auto" left."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    max_queue_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    num_threads: int
    verify_checksums: bool
    max_itl_stretch: float = math.inf


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping: MemAvailable, or the cgroup's remainder where that is smaller."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:  # cached files give way
            used -= next((int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0)
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available


def machine_name() -> str:
    """What measurements hold for: the CPU's name and how many of its threads this process may use."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} threads"


def default_max_num_seqs(manifest: Manifest) -> int:
    """The batch that `runtime bench --knee` found, when it was measured on a machine like this one; else the largest built."""
    knee = manifest.knee
    if knee and knee.get("machine") == machine_name():
        return min(int(knee["max_num_seqs"]), manifest.max_num_seqs)
    return manifest.max_num_seqs


def resolve(config: RuntimeConfig, manifest: Manifest, free_bytes: int | None = None) -> ResolvedConfig:
    """`free_bytes` of the memory that will hold the KV cache; None: this machine's, beside what the engine itself needs.

    Raises ManifestMismatch when a choice exceeds what the engine was built for, or the pool cannot hold one sequence;
    InvalidRequest when the pool that was asked for exceeds the free memory, or does not fit memory_bytes.
    """

    def limited(name: str, default: int) -> int:
        built = getattr(manifest, name)
        asked = getattr(config, name)
        if asked is not None and asked > built:
            raise ManifestMismatch(
                f"{name}={asked} exceeds the {built} the engine was built for; rebuild with --{name.replace('_', '-')} {asked}"
            )
        return asked or default

    if config.memory_bytes is not None and manifest.target != "cpu":
        raise InvalidRequest(
            f"memory_bytes={config.memory_bytes} is for engines of target cpu, not {manifest.target}; set kv_cache_memory_bytes"
        )
    max_model_len = limited("max_model_len", manifest.max_model_len)
    max_num_seqs = limited("max_num_seqs", default_max_num_seqs(manifest))
    max_num_batched_tokens = config.max_num_batched_tokens or manifest.max_num_batched_tokens
    max_num_batched_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)  # no step has more
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidRequest(
            f"max_num_batched_tokens={max_num_batched_tokens} is smaller than max_num_seqs={max_num_seqs}, so a full batch could "
            f"not decode; raise it to at least {max_num_seqs} or lower max_num_seqs"
        )
    block_size = manifest.kv_cache.block_size
    bytes_per_block = manifest.kv_cache.bytes_per_token * block_size
    blocks_per_seq = -(-max_model_len // block_size)
    usable = max_num_seqs * blocks_per_seq
    asked = config.num_blocks
    if asked is None and config.kv_cache_memory_bytes is not None:
        asked = min(config.kv_cache_memory_bytes // bytes_per_block, usable)
    fitting = usable
    if free_bytes is None:
        free_bytes = free_memory_bytes()
        if manifest.target == "cpu":
            largest_step = max_num_batched_tokens if config.enable_chunked_prefill else max(max_num_batched_tokens, max_model_len)
            beside = of_engine(manifest, max_num_seqs, largest_step)
            free_bytes = max(0, free_bytes - beside.still_to_come)
            if config.memory_bytes is not None:
                fitting = _fitting(config.memory_bytes, beside, asked, blocks_per_seq, block_size, bytes_per_block)
    if asked is not None:
        num_blocks = asked
    else:
        share = config.kv_cache_memory_fraction if config.memory_bytes is None else 1.0
        num_blocks = min(int(free_bytes * share) // bytes_per_block, fitting, usable)
    if num_blocks < blocks_per_seq:
        need = blocks_per_seq * bytes_per_block
        raise ManifestMismatch(
            f"the KV cache has {num_blocks} blocks ({num_blocks * bytes_per_block} bytes) but one sequence of "
            f"max_model_len={max_model_len} needs {blocks_per_seq} ({need} bytes); set kv_cache_memory_bytes={need} or more"
            + (f", or max_model_len={num_blocks * block_size} or less" if num_blocks else "")
        )
    if num_blocks * bytes_per_block > free_bytes:
        name, unit = ("num_blocks", bytes_per_block) if config.num_blocks is not None else ("kv_cache_memory_bytes", 1)
        raise InvalidRequest(
            f"{name}={getattr(config, name)} asks for a KV cache of {num_blocks * bytes_per_block} bytes but {free_bytes} are "
            f"free; set it to {free_bytes // unit} or less"
        )
    return ResolvedConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_queue_size=config.max_queue_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling_policy=config.scheduling_policy,
        num_threads=config.num_threads or len(os.sched_getaffinity(0)),
        verify_checksums=config.verify_checksums,
        max_itl_stretch=config.max_itl_stretch,
    )


def _fitting(
    memory_bytes: int, need: BesidePool, asked: int | None, blocks_per_seq: int, block_size: int, bytes_per_block: int
) -> int:
    """Blocks that fit `memory_bytes` beside everything else.

    Raises  InvalidRequest, with the number of tokens that would fit, when they are fewer than asked for or than a sequence needs.
    """
    fitting = max(0, memory_bytes - need.total) // bytes_per_block
    wanted = blocks_per_seq if asked is None else asked
    if fitting < wanted:
        whose = "one sequence of max_model_len needs" if asked is None else "the KV cache that was asked for has"
        raise InvalidRequest(
            f"memory_bytes={memory_bytes} holds {fitting * block_size} tokens of KV cache beside {need.weights} bytes of weights "
            f"and {need.total - need.weights} of process, activations and logits, but {whose} {wanted * block_size} "
            f"({wanted * bytes_per_block} bytes); set memory_bytes={need.total + wanted * bytes_per_block} or more"
            + (
                f", or {'max_model_len' if asked is None else 'the KV cache'} to {fitting * block_size} or less"
                if fitting
                else ""
            )
        )
    return fitting


def from_options(options: Mapping[str, object]) -> RuntimeConfig:
    """RuntimeConfig from keyword arguments. Unknown names raise InvalidRequest."""
    _check_names(options)
    return RuntimeConfig(**options)  # type: ignore[arg-type]


def _check_names(options: Iterable[str]) -> None:
    known = sorted(field.name for field in dataclasses.fields(RuntimeConfig))
    for name in options:
        if name not in known:
            raise InvalidRequest(f"unknown runtime option {name!r}; the options are {', '.join(known)}")


def from_strings(values: dict[str, str]) -> RuntimeConfig:
    """RuntimeConfig from text, as in `--set name=value` or config.pbtxt parameters. Unknown names raise InvalidRequest."""
    _check_names(values)
    fields = {f.name: f for f in dataclasses.fields(RuntimeConfig)}
    parsed: dict[str, object] = {}
    for name, text in values.items():
        kind = str(fields[name].type)
        try:
            if "bool" in kind:
                parsed[name] = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            elif "int" in kind:
                parsed[name] = int(text)
            elif "float" in kind:
                parsed[name] = float(text)
            else:
                parsed[name] = text
        except (ValueError, KeyError):
            raise InvalidRequest(f"{name} is {text!r} but must be {kind.removesuffix(' | None')}") from None
    return RuntimeConfig(**parsed)  # type: ignore[arg-type]
