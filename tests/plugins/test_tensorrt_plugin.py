"""The TensorRT plugin without a GPU: what a step launches, with which arguments, and what IPluginV3 answers.

The CUDA driver is a fake that records calls; the kernels' parameter lists are those of matrix.py, so a missing or misspelt
argument fails here. TensorRT itself is the real TensorRT-RTX module where the plugin's objects are concerned.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types

import pytest

from plugins.paged_attention import cubins, matrix, tuning
from plugins.paged_attention import tensorrt as plugin
from plugins.paged_attention.cubins import KernelBinary
from plugins.paged_attention.tensorrt_op import AttentionSpec
from plugins.paged_attention.tensorrt_step import MAX_SMS, Pointer, StepShape, kernel_names, step_launches, workspace_bytes

SPEC = AttentionSpec(
    layer=3, num_heads=8, num_kv_heads=2, head_dim=64, block_size=64, scale=0.125, key_kind="fp16", value_kind="fp16",
    rotary_dim=64, has_norm=1, eps=2**-20, decode_blocks_per_sm=4, prefill_blocks_per_sm=1,
)  # fmt: skip
FP8 = dataclasses.replace(SPEC, key_kind="fp8", value_kind="int8", has_sinks=1, rotary_dim=0, has_norm=0, sliding_window=128)
DECODE = StepShape(num_tokens=4, num_seqs=4, table_width=8)
MIXED = StepShape(num_tokens=64, num_seqs=4, table_width=8)
STREAM, WORKSPACE, OUT = 77, 1 << 20, 1 << 24


class FakeDriver:
    """cuda.bindings.driver, as far as the plugin calls it."""

    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
    )
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, arch=89, sms=128):
        self.answers = {"major": arch // 10, "minor": arch % 10, "sms": sms}
        self.calls = []

    def cuCtxGetDevice(self):
        return 0, 0

    def cuDeviceGetAttribute(self, attribute, _device):
        return 0, self.answers[attribute]

    def cuModuleLoadData(self, image):
        self.calls.append(("load", image))
        return 0, ("module", image)

    def cuModuleGetFunction(self, module, name):
        return 0, (*module, name)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.calls.append((attribute, function[2], value))
        return (0,)

    def cuLaunchKernel(self, function, *arguments):
        self.calls.append(("launch", function[2].decode(), *arguments))
        return (0,)

    def cuMemsetD8Async(self, *arguments):
        self.calls.append(("memset", *arguments))
        return (0,)


def _binary(spec, arch, shared_bytes=1024):
    return KernelBinary(
        name=spec.name, arch=arch, symbol=spec.name, constants={}, num_warps=4, shared_bytes=shared_bytes, registers=64,
        params=(*spec.params, ("global_scratch", "*i8"), ("profile_scratch", "*i8")),
        spill_bytes=0, compiler="fake", source_sha256="", sha256=cubins.hashlib.sha256(b"cubin").hexdigest(), cubin=b"cubin",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """A kernel directory for sm89 with every kernel the tests use; the prefill kernel wants much shared memory."""
    for spec in (SPEC, FP8):
        wanted = matrix.for_layers([64], "fp16", spec.key_kind, spec.value_kind, 64)
        for kernel in matrix.for_variants(wanted, 89):
            cubins.save(_binary(kernel, 89, 65536 if "prefill" in kernel.name else 1024), tmp_path)
    store = plugin.KernelStore()
    store.directories.append(tmp_path)
    store.driver = FakeDriver()
    return store


def _inputs(spec):
    """Address of each input: 4096, 8192, …"""
    return {name: 4096 * (index + 1) for index, name in enumerate(spec.inputs)}


def _run(spec, store, shape):
    node = plugin.AttentionNode(spec, store, building=False)
    node.prepare(shape, "fp16")
    store.driver.calls.clear()
    node.run(list(_inputs(spec).values()), OUT, WORKSPACE, STREAM, output_bytes=0)
    return store.driver.calls


# ----------------------------------------------------------------------------------------------------------- launches


def test_a_decode_step_is_four_launches(store):
    names = [call[1] for call in _run(SPEC, store, DECODE)]
    assert names == ["write_d64_fp16_kfp16_vfp16", "plan_t64", "attention_decode_d64_fp16_kfp16_vfp16_b64", "merge_d64_fp16_m16"]


def test_a_mixed_step_serves_decodes_and_prefills_apart(store):
    calls = _run(SPEC, store, MIXED)
    assert [call[1].split("_d64")[0] for call in calls] == [
        "write", "plan_t64", "attention_decode", "merge", "plan_t64", "attention_prefill", "merge",
    ]  # fmt: skip
    limits = [(args["min_query"], args["max_query"]) for name, args in _arguments(calls) if name == "plan_t64"]
    assert limits == [(1, 1), (2, 2**30)]


def _arguments(calls):
    """(kernel, parameter → value) of each launch; types and the hidden parameters are checked on the way."""
    by_name = {}
    for spec in (SPEC, FP8):
        for kernel in matrix.for_variants(matrix.for_layers([64], "fp16", spec.key_kind, spec.value_kind, 64), 89):
            by_name[kernel.name] = kernel
    c_types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
    for _, name, *rest in calls:
        values, kinds = rest[8]
        params = by_name[name].params
        assert kinds[-2:] == (ctypes.c_void_p,) * 2 and values[-2:] == (0, 0)
        assert list(kinds[:-2]) == [ctypes.c_void_p if kind[0] == "*" else c_types[kind] for _, kind in params]
        assert all(isinstance(v, float) for v, (_, kind) in zip(values, params, strict=False) if kind == "fp32")
        yield name, dict(zip((key for key, _ in params), values, strict=False))


def test_arguments_of_write_and_attention(store):
    calls = _run(SPEC, store, DECODE)
    found = dict(_arguments(calls))
    at = _inputs(SPEC)
    write = found["write_d64_fp16_kfp16_vfp16"]
    qkv = at["qkv"]
    assert (write["query"], write["key"], write["value"]) == (qkv, qkv + 2 * 512, qkv + 2 * 640)
    assert (write["q_stride"], write["k_stride"], write["v_stride"]) == (768, 768, 768)
    assert (write["rotary_dim"], write["has_norm"], write["layer"], write["query_out"]) == (64, 1, 3, WORKSPACE)
    assert (write["cos"], write["sin"], write["positions"]) == (at["cos"], at["sin"], at["rows"])
    attention = found["attention_decode_d64_fp16_kfp16_vfp16_b64"]
    assert attention["query"] == WORKSPACE and attention["out"] == OUT and attention["kv_table"] == at["kv_pointers"]
    assert (attention["table_stride"], attention["num_seqs"], attention["scale"]) == (8, 4, 0.125)
    merge = found["merge_d64_fp16_m16"]
    assert (merge["plan"], merge["partial"]) == (attention["plan"], attention["partial"])
    assert found["plan_t64"]["plan"] == attention["plan"] == WORKSPACE + 4 * 512 * 2  # after the rotated queries
    _, _, *launch = calls[2]
    assert launch[3:8] == [128, 1, 1, 1024, STREAM]  # block, shared memory, stream


def test_scales_sinks_and_window_reach_the_kernels(store):
    found = dict(_arguments(_run(FP8, store, DECODE)))
    at = _inputs(FP8)
    attention = found["attention_decode_d64_fp16_kfp8_vint8_b64"]
    assert (attention["k_scale"], attention["v_scale"], attention["sinks"]) == (at["k_scale"], at["v_scale"], at["sinks"])
    assert (attention["window"], attention["has_sinks"], found["plan_t64"]["window"]) == (128, 1, 128)
    assert found["write_d64_fp16_kfp8_vint8"]["rotary_dim"] == 0


def test_every_launch_stays_inside_the_workspace():
    for spec in (SPEC, FP8):
        for arch in (80, 89, 120):
            most = StepShape(512, 32, 8)
            room = workspace_bytes(spec, "fp16", arch, most)
            for shape in (most, StepShape(32, 32, 8), StepShape(1, 1, 8), StepShape(33, 32, 8), StepShape(512, 1, 8)):
                launches = step_launches(spec, "fp16", arch, MAX_SMS[arch], shape)
                offsets = [v.offset for launch in launches for v in launch.arguments.values() if _in_workspace(v)]
                last = max(offsets)
                assert last < room
                for launch in launches:
                    if launch.kernel.startswith("attention"):
                        block_m = 16 if "decode" in launch.kernel else 64
                        size = launch.grid[0] * launch.grid[1] * block_m
                        assert launch.arguments["partial"].offset + size * 64 * 4 <= room
                        assert launch.arguments["partial_lse"].offset + size * 4 <= room


def _in_workspace(value):
    return isinstance(value, Pointer) and value.base == "workspace"


def test_kernel_names_are_those_of_the_launches():
    launched = {launch.kernel for shape in (DECODE, MIXED) for launch in step_launches(SPEC, "fp16", 89, 128, shape)}
    assert launched == set(kernel_names(SPEC, "fp16", 89))


# ------------------------------------------------------------------------------------------------- loading and capture


def test_loading_happens_before_the_step_and_once(store):
    node = plugin.AttentionNode(SPEC, store, building=False)
    node.prepare(MIXED, "fp16")
    loads = [call for call in store.driver.calls if call[0] == "load"]
    assert len(loads) == len(kernel_names(SPEC, "fp16", 89)) == 6
    raised = [call[1:] for call in store.driver.calls if call[0] == "shared"]
    assert raised == [(b"attention_prefill_d64_fp16_kfp16_vfp16_b64", 65536)]
    plugin.AttentionNode(SPEC, store, building=False).prepare(DECODE, "fp16")  # another layer's node
    node.prepare(MIXED, "fp16")
    assert len([call for call in store.driver.calls if call[0] == "load"]) == 6
    store.driver.calls.clear()
    node.run(list(_inputs(SPEC).values()), OUT, WORKSPACE, STREAM, output_bytes=0)
    assert {call[0] for call in store.driver.calls} == {"launch"}  # nothing else: the step can be captured


def test_building_launches_nothing_on_garbage(store):
    node = plugin.AttentionNode(SPEC, store, building=True)
    node.prepare(DECODE, "fp16")
    node.run([0xDEAD] * len(SPEC.inputs), OUT, 0, STREAM, output_bytes=4096)
    assert store.driver.calls == [("memset", OUT, 0, 4096, STREAM)]


def test_missing_kernel_names_the_places_looked_at(store, tmp_path):
    spec = dataclasses.replace(SPEC, head_dim=128)
    node = plugin.AttentionNode(spec, store, building=False)
    with pytest.raises(FileNotFoundError, match=r"kernel .*d128.* for sm89 was found in .*; rebuild the engine for sm89"):
        node.prepare(DECODE, "fp16")


def test_a_failing_call_is_named(store):
    node = plugin.AttentionNode(SPEC, store, building=False)
    node.prepare(DECODE, "fp16")
    store.driver.cuLaunchKernel = lambda *_: (700,)
    with pytest.raises(RuntimeError, match="launching kernel write_d64_fp16_kfp16_vfp16 failed with 700"):
        node.run(list(_inputs(SPEC).values()), OUT, WORKSPACE, STREAM, output_bytes=0)


# ----------------------------------------------------------------------------------------------------------- IPluginV3


@pytest.fixture(scope="module")
def trt():
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")


def _plugin(trt, spec, phase):
    creator = plugin._classes(trt)[1]()
    fields = trt.PluginFieldCollection(held := plugin._plugin_fields(trt, spec))
    made = creator.create_plugin("attention", fields, phase)
    del held
    return made


def test_fields_survive_a_round_trip(trt):
    made = _plugin(trt, FP8, trt.TensorRTPhase.RUNTIME)
    assert made.node.spec == FP8 and not made.node.building
    again = _plugin(trt, made.node.spec, trt.TensorRTPhase.BUILD)
    assert again.node.spec == FP8 and again.node.building
    assert {field.name for field in made.get_fields_to_serialize()} == set(FP8.to_dict())
    clone = made.clone()
    assert clone.node.spec == FP8 and clone.node is not made.node
    assert (clone.plugin_name, clone.plugin_namespace, clone.plugin_version) == ("PagedAttention", "forgeline", "1")


def test_formats_and_types(trt):
    made = _plugin(trt, SPEC, trt.TensorRTPhase.BUILD)
    types_of = {
        "rows": trt.DataType.INT64, "kv_pointers": trt.DataType.INT64, "cos": trt.DataType.FLOAT, "sin": trt.DataType.FLOAT,
        **dict.fromkeys(("slot_mapping", "block_table", "query_start_loc", "seq_lens"), trt.DataType.INT32),
    }  # fmt: skip
    for activation in (trt.DataType.HALF, trt.DataType.BF16):
        descs = [_desc(trt, types_of.get(name, activation)) for name in (*SPEC.inputs, "out")]
        assert all(made.supports_format_combination(index, descs, len(SPEC.inputs)) for index in range(len(descs)))
        for index in range(len(descs)):
            wrong = list(descs)
            wrong[index] = _desc(trt, trt.DataType.INT8)
            assert not made.supports_format_combination(index, wrong, len(SPEC.inputs)), index
            wrong[index] = _desc(trt, descs[index].desc.type, trt.TensorFormat.CHW32)
            assert not made.supports_format_combination(index, wrong, len(SPEC.inputs)), index
    mixed = [_desc(trt, types_of.get(name, trt.DataType.HALF)) for name in (*SPEC.inputs, "out")]
    mixed[-1] = _desc(trt, trt.DataType.BF16)  # the output has qkv's type
    assert not made.supports_format_combination(len(SPEC.inputs), mixed, len(SPEC.inputs))


def _desc(trt, dtype, layout=None):
    inner = types.SimpleNamespace(type=dtype, format=layout or trt.TensorFormat.LINEAR)
    return types.SimpleNamespace(desc=inner)


def test_workspace_is_that_of_the_largest_shape(trt):
    made = _plugin(trt, SPEC, trt.TensorRTPhase.BUILD)
    made.node.store.arch = 89
    descs = []
    for name in SPEC.inputs:
        desc = types.SimpleNamespace(type=trt.DataType.HALF, dims=(-1, -1))
        largest = {"qkv": (512, 768), "block_table": (32, 8)}.get(name, (1,))
        descs.append(types.SimpleNamespace(desc=desc, max=largest, min=(1,), opt=(1,)))
    found = made.get_workspace_size(descs, [])
    assert found == workspace_bytes(SPEC, "fp16", 89, StepShape(512, 32, 8))
    assert 512 * 512 * 2 < found < 64 << 20


def test_registering_twice_keeps_one_creator(trt, tmp_path):
    first = plugin.register(trt, kernels=tmp_path, arch=89)
    second = plugin.register(trt, kernels=tmp_path, arch=120)
    assert first is second and first.arch == 120 and first.directories.count(tmp_path) == 1
    creator = trt.get_plugin_registry().get_creator("PagedAttention", "1", "forgeline")
    assert creator is not None
    first.directories.remove(tmp_path)


def test_plugin_hash_covers_its_sources():
    assert len(plugin.sha256()) == 64
    for module in (cubins, matrix, tuning, plugin):
        assert module.__name__.rsplit(".", 1)[-1] in plugin.SOURCES
    assert {"kernels", "kv_write", "cuda_launch", "tensorrt_op", "tensorrt_step"} <= set(plugin.SOURCES)
