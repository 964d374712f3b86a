"""Profiles of pages: read from their file, kept apart from others, refused where wrong."""

from __future__ import annotations

import json
import math
import random
import shlex
from typing import Any

import pytest

from tests.page_profiles import section, write_profile
from vllm_kvcompress import cli, page_profile
from vllm_kvcompress.config import CLIPPINGS, KiviSettings, profile_folder, profile_of
from vllm_kvcompress.page_profile import KiviHints, ModelShape, digest_of, load_page_profile


def test_a_profile_reads_back_from_its_file(tmp_path):
    write_profile(tmp_path, layers=4, four_bits=(1, 3), kivi_skip_layers=(2,), fp8_skip_layers=(0,))
    found = load_page_profile(tmp_path)
    assert found.shape == ModelShape("llama", 4, 2, 32)
    assert found.kivi == KiviHints("least_squares", frozenset({1, 3}), (2,))
    assert found.fp8_skip_layers == (0,)


def test_a_profile_that_is_written_anew_is_read_anew(tmp_path):
    first = load_page_profile(write_profile(tmp_path)).digest
    second = load_page_profile(write_profile(tmp_path, four_bits=(1,))).digest
    assert first != second


def test_everything_in_the_section_changes_the_digest():
    digests = [section(**of)["digest"] for of in ({}, {"four_bits": (1,)}, {"clipping": "none"})]
    assert len(set(digests)) == 3
    assert all(digest_of(section()) == section()["digest"] for _ in range(2))


def test_a_profile_of_another_model_is_refused_by_the_names_of_both(tmp_path):
    profile = load_page_profile(write_profile(tmp_path))
    profile.check_model(profile.shape)
    with pytest.raises(ValueError) as error:
        profile.check_model(ModelShape("qwen3", 28, 8, 128))
    for words in ("some/model", "llama, 2 layers of 2 KV heads of 32", "qwen3, 28 layers of 8"):
        assert words in str(error.value)


def test_a_directory_without_a_profile_says_what_to_give(tmp_path):
    for folder in (tmp_path, tmp_path / "missing", "\0"):
        with pytest.raises(ValueError, match=r"holds no profile.*vllm-kvcompress calibrate"):
            load_page_profile(folder)


def test_a_profile_of_the_codec_alone_says_how_to_get_one_of_pages(tmp_path):
    (tmp_path / "kvcompress.json").write_text('{"format": 1, "cachegen": {}}')
    with pytest.raises(ValueError, match="says nothing of pages; calibrate again, with --windows"):
        load_page_profile(tmp_path)


def read(folder) -> page_profile.PageProfile | None:
    """The profile, None if it is refused in words that say what to do."""
    page_profile._load.cache_clear()
    try:
        return load_page_profile(folder)
    except ValueError as error:
        assert "calibrat" in str(error)
        assert len(str(error)) < 600
        return None


def test_damaged_files_are_refused_with_an_error_that_says_so(tmp_path):
    chance = random.Random(0)
    write_profile(tmp_path, four_bits=(1,))
    path = tmp_path / "kvcompress.json"
    whole, content = load_page_profile(tmp_path), path.read_bytes()
    for _ in range(600):
        broken = bytearray(content)
        for _ in range(chance.choice((1, 1, 5))):
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del broken[chance.randrange(len(broken)) :]
        path.write_bytes(broken)
        found = read(tmp_path)
        assert found in (None, whole)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b"[" * 100_000, b'{"format": 1, "pages": 3}', b"\xff\0"]
)
def test_what_is_no_profile_at_all_is_refused(tmp_path, content):
    (tmp_path / "kvcompress.json").write_bytes(content)
    assert read(tmp_path) is None


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of everything in a JSON value."""
    below = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path] if path else []
    for name, part in below:
        if isinstance(part, dict | list):
            found += places(part, (*path, name))
        else:
            found.append((*path, name))
    return found


STRANGE = (None, True, -1, 0, 2, 1 << 70, 1.5, math.nan, math.inf, "x", "", [], {}, [0, 9], ["0"])


def test_a_section_that_makes_no_sense_is_refused_though_its_digest_is_right(tmp_path):
    chance = random.Random(0)
    for number in range(800):
        content = json.loads(json.dumps(section(layers=3, four_bits=(1,))))
        *way, last = chance.choice([path for path in places(content) if path != ("digest",)])
        place = content
        for name in way:
            place = place[name]
        if number % 4 or isinstance(place, list):
            place[last] = chance.choice(STRANGE)
        else:
            del place[last]
        content["digest"] = digest_of(content)
        found = read(write_profile(tmp_path, content))
        if found is None:
            continue
        named = (*found.kivi.four_bits, *found.kivi.skip_layers, *found.fp8_skip_layers)
        assert {*named} <= {*range(found.shape.layers)}
        assert all(isinstance(layer, int) for layer in named)
        assert found.kivi.clipping in (*CLIPPINGS, None)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        *(
            (("max_loss",), value)
            for value in (-0.1, math.nan, math.inf, "0.1", True, None, 10**400)
        ),
        *((("kivi", "dtype"), value) for value in ("fp8", "kivi", None, [])),
        *((("kivi", "with_4bit", "left"), value) for value in (math.nan, "0", None, False)),
    ],
)
def test_what_only_a_person_reads_is_checked_too(way, value, tmp_path):
    content = section()
    *above, last = way
    place = content
    for name in above:
        place = place[name]
    place[last] = value
    content["digest"] = digest_of(content)
    assert read(write_profile(tmp_path, content)) is None
    del place[last]
    content["digest"] = digest_of(content)
    assert read(write_profile(tmp_path, content)) is None


def test_a_profile_may_allow_no_loss_and_leave_out_every_layer(tmp_path):
    content = {**section(fp8_skip_layers=(0, 1)), "max_loss": 0}
    folder = write_profile(tmp_path, {**content, "digest": digest_of(content)})
    assert read(folder).fp8_skip_layers == (0, 1)


def test_a_model_that_has_no_kivi_pages_has_no_hints_for_them(tmp_path):
    content = section()
    del content["kivi"]
    folder = write_profile(tmp_path, {**content, "digest": digest_of(content)})
    assert load_page_profile(folder).kivi == KiviHints()
    assert KiviSettings.parse(given(str(folder))).clipping == "least_squares"


# --- the setting ---------------------------------------------------------------------------------


def given(profile: Any, **kivi: Any) -> dict[str, Any]:
    return {"kvcompress": {"profile": profile, "kivi": kivi}}


def test_a_profile_gives_what_the_user_has_not_set(tmp_path):
    folder = str(write_profile(tmp_path, clipping="none"))
    assert KiviSettings.parse(given(folder)).clipping == "none"
    assert KiviSettings.parse(given(folder, clipping="least_squares")).clipping == "least_squares"
    assert KiviSettings.parse({}).clipping == "least_squares"
    assert profile_of(given(folder)).digest == load_page_profile(folder).digest


def test_the_published_method_stays_what_it_is(tmp_path):
    folder = str(write_profile(tmp_path, clipping="least_squares"))
    assert KiviSettings.parse(given(folder, preset="kivi")).clipping == "none"


@pytest.mark.parametrize("profile", [3, "", [], {}, True])
def test_a_profile_that_is_no_directory_is_refused_by_name(profile):
    with pytest.raises(ValueError, match=r"kvcompress: profile is .*expected the directory"):
        profile_folder(given(profile))


def test_a_profile_that_is_not_there_is_refused_by_the_name_of_the_setting(tmp_path):
    with pytest.raises(ValueError, match=r"kvcompress: profile: .*holds no profile"):
        KiviSettings.parse(given(str(tmp_path)))


@pytest.mark.parametrize("additional_config", [None, {}, {"kvcompress": {}}, given(None)])
def test_without_a_profile_there_is_none(additional_config):
    assert profile_of(additional_config) is None


def test_serve_hands_the_profile_on_and_refuses_one_that_is_not_there(tmp_path, capsys):
    folder = write_profile(tmp_path / "profile")
    line = ["serve", "M", "--kv-cache-dtype", "kivi_2bit", "--kivi-sink-tokens", "2", "--dry-run"]
    assert cli.main([*line, "--pages-profile", str(folder)]) == 0
    printed = shlex.split(capsys.readouterr().out)
    handed = json.loads(printed[printed.index("--additional-config") + 1])
    assert handed == {"kvcompress": {"profile": str(folder), "kivi": {"sink_tokens": 2}}}
    assert cli.main([*line, "--pages-profile", str(tmp_path)]) != 0
    assert "holds no profile" in capsys.readouterr().err
