"""The ``vllm.general_plugins`` entry point: registers what the package adds, nothing else.

vLLM calls it in the front end, in the engine core and in every worker, and may call it again.
"""


def register() -> None:
    """Make ``KVCompressConnector`` and the KIVI dtypes known to vLLM by name."""
    from vllm_kvcompress import checks, compat
    from vllm_kvcompress.config import KIVI_DTYPES

    compat.remember_cpu_affinity()
    compat.shield_llvmlite()
    compat.register_connector("KVCompressConnector", "vllm_kvcompress.connector.connector")
    compat.add_cache_dtypes(KIVI_DTYPES)
    compat.route_attention(
        KIVI_DTYPES, "vllm_kvcompress.attention.kivi.KiviBackend", checks.refused_layer
    )
    compat.with_layer_dtype(checks.skipped_layer_dtype)
    compat.on_config(checks.check_config)
