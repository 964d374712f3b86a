"""The ``vllm.general_plugins`` entry point: registers what the package adds, nothing else.

vLLM calls it in the front end, in the engine core and in every worker, and may call it again.
"""


def register() -> None:
    """Make ``KVCompressConnector`` known to vLLM by name."""
    from vllm_kvcompress import compat

    compat.remember_cpu_affinity()
    compat.shield_llvmlite()
    compat.register_connector("KVCompressConnector", "vllm_kvcompress.connector.connector")
