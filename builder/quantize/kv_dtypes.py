"""Names of KV cache types, and pairs of them. Standard library only: the command line reads it."""

from __future__ import annotations

from runtime.errors import BuildError

DTYPES = ("f32", "f16", "bf16", "f8", "i8", "u8", "u4")
ALIASES = {"fp8": "f8", "int8": "i8", "fp16": "f16", "fp32": "f32"}


def canonical(name: str) -> str:
    return ALIASES.get(name, name)


def parse_pair(text: str) -> tuple[str, str]:
    """`K:V`, or one type for both. Raises BuildError naming the types."""
    key, colon, value = text.partition(":")
    key, value = canonical(key), canonical(value if colon else key)
    for dtype in (key, value):
        if dtype not in DTYPES:
            raise BuildError(
                f"--kv-cache-dtype {text!r} is not auto, a type or a pair KEYS:VALUES of types; the types are {', '.join(DTYPES)}"
            )
    return key, value
