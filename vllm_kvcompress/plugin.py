"""The ``vllm.general_plugins`` entry point: registers what the package adds, nothing else.

vLLM calls it in the front end, in the engine core and in every worker, and may call it again.
"""

from typing import Any


def register() -> None:
    """Make the connector and the KIVI dtypes known to vLLM by name, and FP8 pages ours."""
    from vllm_kvcompress import audit, checks, compat
    from vllm_kvcompress.attention import routing
    from vllm_kvcompress.config import KIVI_DTYPES

    def built(layer: Any) -> None:
        routing.check_layer(layer)
        audit.arrange()

    compat.remember_cpu_affinity()
    compat.shield_llvmlite()
    compat.register_connector("KVCompressConnector", "vllm_kvcompress.connector.connector")
    compat.add_cache_dtypes(KIVI_DTYPES)
    compat.route_attention(routing.attention_backend, routing.KIVI_BACKEND)
    compat.on_layer(checks.layer_dtype, built)
    compat.on_config(checks.check_config)
