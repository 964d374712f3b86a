"""The vLLM KV connector: which blocks to offload and to load, and doing it beside the model."""
