"""Every place where the package holds on to something of vLLM that a release may change.

A test that fails here names the function of ``vllm_kvcompress/compat.py`` to look at, and what of
vLLM it lacks. Nothing is started.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress import compat
from vllm_kvcompress.cli.doctor import SUPPORTED_VLLM

CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
SPECS = "vllm.v1.kv_cache_interface"
ATTENTION = "vllm.model_executor.layers.attention.attention"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
PLATFORMS = ("vllm.platforms.cpu:CpuPlatform", "vllm.platforms.cuda:CudaPlatformBase")

# "module:object" must be there, "module:object(a, b)" must take these parameters, and the source of
# "module:object ~ text" must contain the text.
SEAMS: dict[str, tuple[str, ...]] = {
    "register_connector": (
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry",
        "vllm.distributed.kv_transfer.kv_connector.factory"
        ":KVConnectorFactory.register_connector(name, module_path, class_name)",
        "vllm.distributed.kv_transfer.kv_connector.factory"
        ":KVConnectorFactory.get_connector_class_by_name(connector_name)",
    ),
    "with_offload_config": (
        "vllm.config:VllmConfig ~ kv_transfer_config:",
        "vllm.config:KVTransferConfig ~ kv_connector_extra_config:",
    ),
    "inside_multi_connector": (
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector.__init__",
    ),
    "request_keys": ("vllm.v1.kv_offload.base:ReqContext ~ _offload_key_positions",),
    "offload_groups": (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config"
        ":get_offloading_group_ids(kv_cache_config)",
        f"{SPECS}:UniformTypeKVCacheSpecs ~ kv_cache_specs:",
        f"{SPECS}:KVCacheGroupSpec ~ layer_names:",
        f"{SPECS}:KVCacheGroupSpec ~ kv_cache_spec:",
        f"{SPECS}:AttentionSpec ~ state_content_bytes:",
        f"{SPECS}:AttentionSpec ~ tokens_per_state:",
        f"{SPECS}:AttentionSpec ~ head_size_v:",
        f"{SPECS}:AttentionSpec.unpadded_page_size_bytes",
        f"{SPECS}:FullAttentionSpec",
        f"{SPECS}:SlidingWindowSpec",
        f"{SPECS}:MLAAttentionSpec",
    ),
    "attention_layer": ("vllm.config:CompilationConfig ~ static_forward_context:",),
    "write_through_backend": (
        f"{CPU_ATTENTION}:CPUAttentionBackendImpl.do_kv_cache_update"
        "(layer, key, value, kv_cache, slot_mapping)",
        "vllm.v1.attention.backend:MLAAttentionImpl.do_kv_cache_update"
        "(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)",
    ),
    "scales_of": (
        f"{ATTENTION}:set_default_quant_scales ~ _k_scale",
        f"{ATTENTION}:set_default_quant_scales ~ _v_scale",
    ),
    "add_cache_dtypes": (
        "vllm.config.cache:CacheDType",
        "vllm.engine.arg_utils:CacheDType",
        "vllm.v1.attention.selector:CacheDType",
        "vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE",
        "vllm.config.cache:CacheConfig ~ cache_dtype: CacheDType",
        "vllm.config.cache:CacheConfig.__pydantic_fields__",
        "vllm.config.cache:CacheConfig.__dataclass_fields__",
    ),
    "route_attention": (
        *(
            f"{platform}.get_attn_backend_cls(selected_backend, attn_selector_config)"
            for platform in PLATFORMS
        ),
        "vllm.v1.attention.backends.registry:register_backend(backend, class_path)",
        f"vllm.v1.attention.backends.registry:AttentionBackendEnum.{compat.CUSTOM_BACKEND}",
    ),
    "on_config": tuple(
        f"{platform}.check_and_update_config(vllm_config)" for platform in PLATFORMS
    ),
    "on_available_memory": (
        f"{CPU_WORKER}.determine_available_memory(self)",
        f"{GPU_WORKER}.determine_available_memory(self)",
        "vllm.v1.worker.worker_base:WorkerBase ~ self.vllm_config",
    ),
    "after_loading": (
        f"{GPU_WORKER}.get_kv_cache_spec(self)",
        "vllm.v1.worker.worker_base:WorkerBase ~ self.rank",
    ),
    "on_layer": (
        f"{ATTENTION}:Attention.__init__(cache_config, prefix, per_layer_sliding_window)",
        f"{ATTENTION}:Attention ~ self.attn_backend",
        "vllm.config.cache:CacheConfig ~ sliding_window:",
        "vllm.config.cache:CacheConfig ~ kv_cache_dtype_skip_layers:",
        f"{CPU_ATTENTION}:CPUAttentionMetadataBuilder.__init__"
        "(kv_cache_spec, layer_names, vllm_config, device)",
    ),
    "on_cache_write": (
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders(vllm_config, device)",
        "vllm.v1.worker.utils:AttentionGroup ~ self.metadata_builders",
        "vllm.v1.worker.utils:AttentionGroup ~ kv_cache_spec:",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build"
        "(common_prefix_len, common_attn_metadata, fast_build)",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.update_block_table"
        "(metadata, blk_table, slot_mapping)",
        "vllm.v1.attention.backend:CommonAttentionMetadata ~ slot_mapping:",
    ),
    "is_cpu": ("vllm.platforms.interface:Platform.is_cpu(self)",),
    "lacks_e4m3": (
        "vllm.platforms.interface:Platform.is_cuda(self)",
        "vllm.platforms.interface:Platform.has_device_capability(capability)",
    ),
    "doubles_scales": ("vllm.platforms.interface:Platform.is_fp8_fnuz()",),
    "device": ("vllm.platforms.interface:Platform ~ device_type:",),
    "tensor_parallel_rank": (
        "vllm.distributed:get_tensor_model_parallel_rank",
        "vllm.distributed:get_tensor_model_parallel_world_size",
    ),
    "checkpoint_folder": (
        "vllm.config:LoadConfig ~ load_format:",
        "vllm.config:ModelConfig ~ model:",
        "vllm.config:ModelConfig ~ revision:",
    ),
    "kv_cache_scheme": ("vllm.config:ModelConfig ~ hf_config",),
    "layer_number": ("vllm.model_executor.models.utils:extract_layer_index(layer_name)",),
    "current_vllm_config": ("vllm.config.vllm:get_current_vllm_config_or_none()",),
    "is_opaque_spec": (
        f"{SPECS}:AttentionSpec ~ kv_quant_mode:",
        f"{SPECS}:KVQuantMode.NONE",
    ),
    "finish_stores": (
        "vllm.v1.engine.llm_engine:LLMEngine.step(self)",
        "vllm.v1.engine.llm_engine:LLMEngine ~ self.engine_core",
        "vllm.v1.engine.core_client:InprocClient ~ self.engine_core",
        "vllm.v1.engine.core:EngineCore ~ self.scheduler",
        "vllm.v1.core.sched.scheduler:Scheduler ~ self.connector",
        "vllm.distributed.kv_transfer.kv_connector.v1.base"
        ":KVConnectorBase_V1.has_pending_push_work(self)",
    ),
    "attention_layers": (
        "vllm.config:get_layers_from_vllm_config(vllm_config, layer_type)",
        f"{ATTENTION}:Attention ~ self.attn_type",
        f"{ATTENTION}:Attention ~ self.kv_sharing_target_layer_name",
    ),
}

OWN = {"remember_cpu_affinity", "release_cpu_affinity", "shield_llvmlite"}
"""Functions of compat.py that hold on to nothing of vLLM, and why it needs them is its own."""


def functions() -> list[ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(compat))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def imports() -> list[tuple[str, str, str]]:
    """Function, module and name of everything that compat.py imports of vLLM."""
    return [
        (function.name, node.module, alias.name)
        for function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "vllm"
        for alias in node.names
    ]


def resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def parameters_of(path: str) -> set[str]:
    """The parameters of a function, read from its source where vLLM is built for another device."""
    try:
        return set(inspect.signature(resolve(path)).parameters)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm._C"):
            raise
    module, _, name = path.partition(":")
    body = ast.parse(Path(find_spec(module).origin).read_text()).body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            raise AttributeError(f"{module} has no {name}")
        body = found.body
    return {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}


def test_the_supported_vllm_is_the_installed_one():
    assert metadata.version("vllm").partition("+")[0] == SUPPORTED_VLLM


def test_every_function_of_compat_names_its_seams():
    public = {f.name for f in functions() if not f.name.startswith("_")}
    assert public - {*SEAMS, *OWN} == set()


@pytest.mark.parametrize(("function", "module", "name"), imports(), ids="-".join)
def test_what_is_imported_is_there(function, module, name):
    assert hasattr(import_module(module), name), f"compat.{function} imports {module}.{name}"


@pytest.mark.parametrize(
    ("function", "seam"),
    [(function, seam) for function, seams in SEAMS.items() for seam in seams],
    ids=lambda value: value.rpartition(":")[2],
)
def test_the_seam_is_there(function, seam):
    path, tilde, text = seam.partition(" ~ ")
    path, parenthesis, given = path.partition("(")
    try:
        if parenthesis:
            wanted = {name for name in re.split(r"[, )]+", given) if name and name != "self"}
            lacking = sorted(wanted - parameters_of(path))
            assert not lacking, f"compat.{function} calls {path} with {lacking}"
        else:
            found = resolve(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"compat.{function} needs {path}: {error}")
    if tilde:
        assert text in inspect.getsource(found), f"compat.{function} needs {text!r} in {path}"
