"""PagedAttention as a TensorRT plugin (IPluginV3) that launches this package's ahead-of-time kernels. Imports no TensorRT itself.

`register(trt)` takes the module, `tensorrt` or `tensorrt_rtx`; the builder calls it before parsing, the runtime before
deserializing. What one step launches is worked out when shapes change (tensorrt_step.py), so `enqueue` only fills in addresses:
it never allocates or synchronizes, and may run inside a CUDA graph capture.

Builder timing calls `enqueue` with whatever is in memory as addresses and lengths. A plugin made in the build phase therefore
only clears its output; kernels run in plugins that come from a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from plugins.paged_attention import cubins
from plugins.paged_attention.cuda_launch import Launcher, cuda_driver
from plugins.paged_attention.tensorrt_op import NAME, NAMESPACE, VERSION, AttentionSpec
from plugins.paged_attention.tensorrt_step import Launch, Pointer, StepShape, step_launches, workspace_bytes

SOURCES = ("cubins", "cuda_launch", "kernels", "kv_write", "matrix", "tensorrt", "tensorrt_op", "tensorrt_step", "tuning")


@lru_cache(maxsize=1)
def sha256() -> str:
    """Of everything a plan relies on: an engine runs only with the plugin and kernels it was built for."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


class KernelStore:
    """Where compiled kernels lie; one per process and TensorRT module, since its plugin registry is one too."""

    def __init__(self) -> None:
        self.directories: list[Path] = []
        self.arch = 0  # what is being built for; at run time the device says
        self.driver: Any = None
        self._launcher: Launcher | None = None

    def launcher(self) -> Launcher:
        if self._launcher is None:
            self._launcher = Launcher(self.driver or cuda_driver())
        return self._launcher

    def load(self, name: str, arch: int) -> cubins.KernelBinary:
        for directory in self.directories:
            try:
                return cubins.load(directory, arch, name)
            except FileNotFoundError:
                continue
        places = ", ".join(map(str, self.directories)) or "no directory"
        raise FileNotFoundError(f"kernel {name} for sm{arch} was found in {places}; rebuild the engine for sm{arch}")


class AttentionNode:
    """What a plugin object does, apart from being one: shapes and addresses in, launches out."""

    def __init__(self, spec: AttentionSpec, store: KernelStore, *, building: bool) -> None:
        self.spec = spec
        self.store = store
        self.building = building
        self._launches: list[Launch] = []
        self._shape: tuple[StepShape, str] | None = None

    def prepare(self, shape: StepShape, query_dtype: str) -> None:
        """Load what a step of this shape needs and plan its launches. Before capture."""
        if self.building or self._shape == (shape, query_dtype):
            return
        launcher = self.store.launcher()
        arch = cubins.arch_for(launcher.compute_capability())
        self._launches = step_launches(self.spec, query_dtype, arch, launcher.num_sms(), shape)
        for name in dict.fromkeys(launch.kernel for launch in self._launches):
            launcher.load(self.store.load(name, arch))
        self._shape = (shape, query_dtype)

    def run(self, inputs: Sequence[int], output: int, workspace: int, stream: int, *, output_bytes: int) -> None:
        launcher = self.store.launcher()
        if self.building:
            launcher.clear(output, output_bytes, stream)
            return
        addresses = dict(zip(self.spec.inputs, inputs, strict=True))
        addresses |= {"out": output, "workspace": workspace}
        for launch in self._launches:
            arguments = {
                name: addresses[value.base] + value.offset if isinstance(value, Pointer) else value
                for name, value in launch.arguments.items()
            }
            launcher.launch(launch.kernel, launch.grid, arguments, stream)


@lru_cache(maxsize=2)
def _classes(trt: Any) -> tuple[Any, Any]:
    """The plugin and its creator, for `tensorrt` or `tensorrt_rtx`."""
    query_dtypes = {trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
    types = {
        "rows": (trt.DataType.INT64,),
        "kv_pointers": (trt.DataType.INT64,),
        **dict.fromkeys(("slot_mapping", "block_table", "query_start_loc", "seq_lens"), (trt.DataType.INT32,)),
        **dict.fromkeys(("cos", "sin", "k_scale", "v_scale", "sinks"), (trt.DataType.FLOAT,)),
    }
    capabilities = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    def step_shape(descs: Any, dims: Any) -> StepShape:
        table = dims(descs[3])
        return StepShape(num_tokens=dims(descs[0])[0], num_seqs=table[0], table_width=table[1])

    class PagedAttention(*capabilities):  # type: ignore[misc]
        def __init__(self, node: AttentionNode) -> None:
            for base in capabilities:
                base.__init__(self)
            self.node = node
            self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.num_outputs = 1
            self.timing_cache_id = ""  # nothing is timed

        def get_capability_interface(self, _kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            node = self.node
            return PagedAttention(AttentionNode(node.spec, node.store, building=node.building))

        def attach_to_context(self, _context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            self._fields = _plugin_fields(trt, self.node.spec)  # TensorRT keeps pointers into them
            return trt.PluginFieldCollection(self._fields)

        # build

        def get_output_data_types(self, inputs: Any) -> Any:
            return [inputs[0]]

        def get_output_shapes(self, inputs: Any, _shape_inputs: Any, builder: Any) -> Any:
            out = trt.DimsExprs(2)
            out[0] = inputs[0][0]
            out[1] = builder.constant(self.node.spec.q_width)
            return [out]

        def supports_format_combination(self, position: int, descs: Any, num_inputs: int) -> bool:
            desc = descs[position].desc
            if desc.format != trt.TensorFormat.LINEAR:
                return False
            if position == 0:
                return desc.type in query_dtypes
            name = self.node.spec.inputs[position] if position < num_inputs else "out"
            return desc.type in types.get(name, (descs[0].desc.type,))  # norms and the output have qkv's type

        def configure_plugin(self, _inputs: Any, _outputs: Any) -> None:
            pass

        def get_workspace_size(self, inputs: Any, _outputs: Any) -> int:
            arch = self.node.store.arch or cubins.arch_for(self.node.store.launcher().compute_capability())
            shape = step_shape(inputs, lambda desc: tuple(desc.max))
            return workspace_bytes(self.node.spec, query_dtypes[inputs[0].desc.type], arch, shape)

        def get_valid_tactics(self) -> list[int]:
            return []

        # run

        def set_tactic(self, _tactic: int) -> None:
            pass

        def on_shape_change(self, inputs: Any, _outputs: Any) -> None:
            self.node.prepare(step_shape(inputs, lambda desc: tuple(desc.dims)), query_dtypes[inputs[0].type])

        def enqueue(self, _input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
            rows, width = tuple(output_desc[0].dims)
            self.node.run(inputs, outputs[0], workspace, stream, output_bytes=2 * rows * width)

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.store = KernelStore()
            self._fields = _plugin_fields(trt, _EXAMPLE)
            self.field_names = trt.PluginFieldCollection(self._fields)

        def create_plugin(self, _name: str, fields: Any, phase: Any) -> Any:
            spec = AttentionSpec.from_dict({field.name: _field_value(field) for field in fields})
            return PagedAttention(AttentionNode(spec, self.store, building=phase == trt.TensorRTPhase.BUILD))

    return PagedAttention, Creator


_EXAMPLE = AttentionSpec(
    layer=0, num_heads=1, num_kv_heads=1, head_dim=64, block_size=64, scale=1.0, key_kind="fp16", value_kind="fp16"
)
_creators: dict[str, Any] = {}


def register(trt: Any, *, kernels: Path | None = None, arch: int | None = None, driver: Any = None) -> KernelStore:
    """Make the plugin known to TensorRT. May be called again: `kernels` adds a directory, `arch` and `driver` replace.

    `arch` says what plans are being built for; a build on the GPU itself can leave it to the device.
    """
    creator = _creators.get(trt.__name__)
    if creator is None:
        creator = _creators[trt.__name__] = _classes(trt)[1]()
        accepted = trt.get_plugin_registry().register_creator(creator, NAMESPACE)
        assert accepted, f"another plugin is registered as {NAMESPACE}::{NAME} version {VERSION}"
    store: KernelStore = creator.store
    if kernels is not None and kernels not in store.directories:
        store.directories.append(kernels)
    if arch is not None:
        store.arch = arch
    if driver is not None:
        store.driver = driver
    return store


def _plugin_fields(trt: Any, spec: AttentionSpec) -> list[Any]:
    import numpy as np

    kinds = trt.PluginFieldType
    fields = []
    for name, value in spec.to_dict().items():
        if isinstance(value, str):
            fields.append(trt.PluginField(name, np.frombuffer(value.encode(), np.int8), kinds.CHAR))
        elif isinstance(value, float):
            fields.append(trt.PluginField(name, np.array([value], np.float32), kinds.FLOAT32))
        else:
            fields.append(trt.PluginField(name, np.array([value], np.int32), kinds.INT32))
    return fields


def _field_value(field: Any) -> int | float | str:
    """Text arrives as bytes or int8, numbers as arrays of one."""
    import numpy as np

    if isinstance(field.data, bytes):
        return field.data.rstrip(b"\0").decode()
    array = np.asarray(field.data)
    if array.dtype in (np.int8, np.uint8):
        return array.tobytes().rstrip(b"\0").decode()
    return array.reshape(-1)[0].item()
