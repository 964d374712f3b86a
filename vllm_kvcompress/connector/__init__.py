"""The vLLM KV connector: which blocks to offload and to load, and doing it beside the model."""

from vllm_kvcompress import compat

# Here too, for a connector that is loaded by its module path without the plugin.
compat.remember_cpu_affinity()
compat.shield_llvmlite()
