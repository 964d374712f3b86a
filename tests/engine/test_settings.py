"""Wrong settings are refused at start, by name, with the choices."""

from __future__ import annotations

import pytest

from vllm_kvcompress.config import OffloadSettings


@pytest.mark.parametrize(
    ("extra_config", "expected"),
    [
        ({"codek": "cachegen"}, ["codek", "codec"]),
        ({"codec": "zip"}, ["codec", "zip", "cachegen", "raw"]),
        ({"codec": 3}, ["codec", "3"]),
        ({"codec": None}, ["codec"]),
        ({"level": "extreme"}, ["level", "extreme", "high", "medium"]),
        ({"codec": "raw", "level": "high"}, ["level"]),
        ({"stores": []}, ["stores"]),
        ({"stores": {"type": "memory"}}, ["stores"]),
        ({"stores": [{"bytes": 1}]}, ["stores"]),
        ({"staging_bytes": "-1"}, ["staging_bytes", "-1"]),
        ({"staging_bytes": "many"}, ["staging_bytes", "many"]),
        ({"threads": 0}, ["threads", "0"]),
        ({"threads": True}, ["threads", "True"]),
        ({"chunk_tokens": 2.5}, ["chunk_tokens", "2.5"]),
        ({"retry_seconds": -1}, ["retry_seconds", "-1"]),
        ({"retry_seconds": float("nan")}, ["retry_seconds"]),
        ({"levels": []}, ["levels", "high"]),
        ({"levels": "high"}, ["levels", "high"]),
        ({"levels": ["high", "high"]}, ["levels", "high"]),
        ({"levels": ["high", "extreme"]}, ["level", "extreme", "medium"]),
        ({"levels": [str(i) for i in range(9)]}, ["levels", "8"]),
        ({"levels": ["high"], "level": "low"}, ["levels", "level", "high", "low"]),
        ({"ttft_slo_ms": 0}, ["ttft_slo_ms", "0"]),
        ({"ttft_slo_ms": "fast"}, ["ttft_slo_ms", "fast"]),
        ({"write_back": "yes"}, ["write_back", "yes"]),
        ({"offload_prompt_only": 1}, ["offload_prompt_only"]),
        ({"block_size": 256}, ["block_size", "chunk_tokens"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name(extra_config, expected):
    with pytest.raises(ValueError) as error:
        OffloadSettings.parse(extra_config)
    for word in expected:
        assert word in str(error.value)


def test_defaults_need_no_setting_at_all():
    settings = OffloadSettings.parse({})
    assert [codec.name for codec in settings.create_codecs()] == ["cachegen"]


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ({"stores": [{"type": "tape"}]}, "tape"),
        ({"stores": [{"type": "memory", "bytes": "-3"}]}, "bytes"),
        ({"stores": [{"type": "disk", "path": "/proc/kvcompress"}]}, "path"),
        ({"chunk_tokens": 50}, "use 64"),
        ({"staging_bytes": 1000}, "staging_bytes is 1000"),
        ({"codec": "cachegen", "levels": ["high", "low"]}, "outlives this process"),
    ],
)
def test_the_engine_does_not_start_on_a_wrong_setting(llama, offload, expected):
    from tests.engine.conftest import running_engine

    with (
        pytest.raises(ValueError, match=expected),
        running_engine(llama, {"codec": "raw", **offload}),
    ):
        pass


def test_a_level_may_be_another_codec():
    settings = OffloadSettings.parse({"levels": ["raw", "high", "low"]})
    assert [codec.name for codec in settings.create_codecs()] == ["raw", "cachegen", "cachegen"]
    assert settings.streaming
    assert not OffloadSettings.parse({"level": "high"}).streaming
    assert OffloadSettings.parse({"ttft_slo_ms": 250}).streaming


def test_the_engine_does_not_start_inside_multi_connector(llama):
    from tests.engine.conftest import running_engine

    child = {"kv_connector": "KVCompressConnector", "kv_role": "kv_both"}
    with (
        pytest.raises(ValueError, match="MultiConnector"),
        running_engine(
            llama,
            None,
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [child, child]},
            },
        ),
    ):
        pass


def test_another_package_under_the_connectors_name_is_an_error():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_kvcompress import compat

    name = "SomebodyElsesConnector"
    KVConnectorFactory.register_connector(
        name,
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector",
    )
    try:
        with pytest.raises(RuntimeError, match=name):
            compat.register_connector(name, "vllm_kvcompress.connector.connector")
    finally:
        del KVConnectorFactory._registry[name]
