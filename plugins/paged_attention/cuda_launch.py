"""Loads cubins and launches them through the CUDA driver API (cuda-python), by parameter name.

`driver` is `cuda.bindings.driver`, or in tests a fake that records the calls. Loading happens before any capture; `launch`
neither allocates nor synchronizes, so it may run inside a CUDA graph capture.

Raises   RuntimeError with the name of the call and of CUDA's error
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.paged_attention.cubins import KernelBinary

_STATIC_SHARED_LIMIT = 48 << 10  # bytes of dynamic shared memory that need no permission
_SCRATCH = ("global_scratch", "profile_scratch")  # the compiler's; unused by kernels that passed aot.check
_C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def cuda_driver() -> Any:
    """`cuda.bindings.driver`; needs the cuda-python package and a driver."""
    from cuda.bindings import driver

    return driver


@dataclass(frozen=True)
class Function:
    binary: KernelBinary
    handle: Any  # CUfunction
    module: Any  # keeps the code loaded


class Launcher:
    """Functions of one device context, loaded once each."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._functions: dict[str, Function] = {}

    def check(self, result: Any, what: str) -> Any:
        """cuda-python returns (error, value …)."""
        error, *values = result
        if int(error) != 0:
            raise RuntimeError(f"{what} failed with {getattr(error, 'name', error)}")
        return values[0] if values else None

    def compute_capability(self) -> int:
        """major * 10 + minor of the current context's device."""
        attributes = self._driver.CUdevice_attribute
        major = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        return 10 * major + self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)

    def num_sms(self) -> int:
        return self._attribute(self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    def _attribute(self, attribute: Any) -> int:
        device = self.check(self._driver.cuCtxGetDevice(), "cuCtxGetDevice")
        return int(self.check(self._driver.cuDeviceGetAttribute(attribute, device), "cuDeviceGetAttribute"))

    def load(self, binary: KernelBinary) -> None:
        if binary.name in self._functions:
            return
        module = self.check(self._driver.cuModuleLoadData(binary.cubin), f"loading kernel {binary.name}")
        handle = self.check(self._driver.cuModuleGetFunction(module, binary.symbol.encode()), f"finding {binary.symbol}")
        if binary.shared_bytes > _STATIC_SHARED_LIMIT:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.check(
                self._driver.cuFuncSetAttribute(handle, attribute, binary.shared_bytes),
                f"allowing kernel {binary.name} {binary.shared_bytes} bytes of shared memory",
            )
        self._functions[binary.name] = Function(binary, handle, module)

    def launch(self, name: str, grid: tuple[int, int, int], arguments: Mapping[str, int | float], stream: int) -> None:
        """`arguments` by parameter name; addresses are integers."""
        function = self._functions[name]
        binary = function.binary
        names = [parameter for parameter, _ in binary.params if parameter not in _SCRATCH]
        assert set(names) == set(arguments), f"{name} takes {names}, not {sorted(arguments)}"
        values, types = [], []
        for parameter, kind in binary.params:
            values.append(0 if parameter in _SCRATCH else arguments[parameter])
            types.append(ctypes.c_void_p if kind.startswith("*") else _C_TYPES[kind])
        result = self._driver.cuLaunchKernel(
            function.handle, *grid, 32 * binary.num_warps, 1, 1, binary.shared_bytes, stream, (tuple(values), tuple(types)), 0
        )
        self.check(result, f"launching kernel {name}")

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Zeros, in stream order."""
        self.check(self._driver.cuMemsetD8Async(address, 0, num_bytes, stream), "cuMemsetD8Async")
