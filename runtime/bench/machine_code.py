"""Three loops in x86-64 machine code: read memory, multiply-add fp32, multiply-add int8. What a core can do.

Each is called with (pointer, iterations, rounds) in the System V convention and starts again at the pointer every round.
None where the machine cannot run it.

    read   256 bytes an iteration, 32-byte loads
    fp32   12 independent VFMADD231PS an iteration, 512 bits wide where there is AVX-512
    int8   12 independent VPDPBUSD an iteration (u8 × s8 → s32); without VNNI the VPMADDUBSW that stands in for it
Source  Intel SDM volume 2, the VEX and EVEX prefixes
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

READ_BYTES = 256
_ACCUMULATORS = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)  # 7 and 15 are the factors
_FACTOR_A, _FACTOR_B = 15, 7


@dataclass(frozen=True)
class Kernel:
    name: str
    code: bytes
    work_per_iteration: int  # bytes read, or operations (a multiply-add is two)

    def load(self) -> Callable[[int, int, int], None]:
        """(pointer, iterations, rounds), runs without the GIL.  Raises  OSError where memory cannot be made executable"""
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(self.code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(address)

        def call(pointer: int, iterations: int, rounds: int, _keep: mmap.mmap = page) -> None:
            function(pointer, iterations, rounds)

        return call


@cache
def cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return frozenset(next((line.split(":", 1)[1].split() for line in file if line.startswith("flags")), ()))
    except OSError:
        return frozenset()


def read_kernel() -> Kernel | None:
    if not _runs("avx"):
        return None
    loads = b"".join(b"\xc5\xfc\x10" + bytes([0x80 | register << 3]) + _int32(32 * register) for register in range(8))
    return Kernel("vmovups ymm", _loop(loads + b"\x48\x05" + _int32(READ_BYTES)), READ_BYTES)


def fp32_kernel() -> Kernel | None:
    if _runs("avx512f"):
        return _arithmetic("vfmadd231ps zmm", lambda register: _evex(0xB8, register), 2 * 16)
    return _arithmetic("vfmadd231ps ymm", lambda register: _vex(0xB8, register), 2 * 8) if _runs("avx2", "fma") else None


def int8_kernel() -> Kernel | None:
    if _runs("avx512_vnni"):
        return _arithmetic("vpdpbusd zmm", lambda register: _evex(0x50, register), 2 * 64)
    if _runs("avx_vnni"):
        return _arithmetic("vpdpbusd ymm", lambda register: _vex(0x50, register), 2 * 32)
    return _arithmetic("vpmaddubsw ymm", lambda register: _vex(0x04, register), 2 * 32) if _runs("avx2") else None


def _runs(*flags: str) -> bool:
    return platform.machine() == "x86_64" and cpu_flags().issuperset(flags)


def _arithmetic(name: str, encode: Callable[[int], bytes], operations: int) -> Kernel:
    clear = b"".join(_clear(register) for register in (*_ACCUMULATORS, _FACTOR_A, _FACTOR_B))
    body = b"".join(encode(register) for register in _ACCUMULATORS)
    return Kernel(name, clear + _loop(body), operations * len(_ACCUMULATORS))


def _loop(body: bytes) -> bytes:
    """again: rax = rdi; rcx = rsi; next: body; dec rcx; jnz next; dec rdx; jnz again; vzeroupper; ret"""
    inner = body + b"\x48\xff\xc9"
    inner += b"\x0f\x85" + _int32(-(len(inner) + 6))
    outer = b"\x48\x89\xf8\x48\x89\xf1" + inner + b"\x48\xff\xca"
    return outer + b"\x0f\x85" + _int32(-(len(outer) + 6)) + b"\xc5\xf8\x77\xc3"


def _int32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def _modrm(register: int, source: int) -> int:
    return 0xC0 | (register & 7) << 3 | (source & 7)


def _clear(register: int) -> bytes:
    """vxorps xmm, xmm, xmm: clears the whole register"""
    high = 0 if register < 8 else 1
    first = 0xE1 & ~(high << 7) & ~(high << 5)
    return bytes([0xC4, first, (~register & 15) << 3, 0x57, _modrm(register, register)])


def _vex(opcode: int, register: int) -> bytes:
    """VEX.256.66.0F38.W0 opcode: register ← register, _FACTOR_A, _FACTOR_B"""
    first = 0xE2 if register < 8 else 0x62
    return bytes([0xC4, first, (~_FACTOR_A & 15) << 3 | 0b101, opcode, _modrm(register, _FACTOR_B)])


def _evex(opcode: int, register: int) -> bytes:
    """EVEX.512.66.0F38.W0 opcode: register ← register, _FACTOR_A, _FACTOR_B"""
    first = 0xF2 if register < 8 else 0x72
    return bytes([0x62, first, (~_FACTOR_A & 15) << 3 | 0b101, 0x48, opcode, _modrm(register, _FACTOR_B)])
