# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.errors import Location
from fmha_gen.show.schema import schema
from fmha_gen.spec.model import Spec, load_specs
from pydantic import ValidationError

MINIMAL: dict[str, Any] = {
    "arch": "sm90",
    "op": "fmha_fwd",
    "dtype": "bf16",
    "head_dim": 128,
}


def spec(**fields: Any) -> Spec:
    return Spec.model_validate(MINIMAL | fields)


def test_defaults() -> None:
    assert spec().model_dump() == {
        **MINIMAL,
        "head_dim": {"qk": 128, "v": 128},
        "seqlen": {"q": "dynamic", "kv": "dynamic"},
        "batch": "dense",
        "kv": {"paged": {"page": "none"}},
        "heads": {"q_per_kv": 1},
        "pack_gqa": False,
        "softcap": "none",
        "bias": {"shape": ("b", "h", "q", "kv"), "dtype": "none"},
        "mask": "none",
        "window": {"left": "none", "right": "none"},
        "blocks": "derived",
        **{"out_dtype": "none", "v_layout": "rows", "descale": "none", "exp": "exact"},
        **{"params": {}, "chunk": "none", "documents": False, "prefix": False},
        "lse": False,
        "sink": False,
        "score": "none",
        "alibi": False,
        "cluster": (1, 1),
        "multicast": "none",
        "cta_group": 1,
        "tile": {"q": None, "kv": None},
        "deterministic": False,
        "dq_sums": "fp32",
        "stages": {"q": None, "kv": None, "do": None, "v": None},
        "schedule": "persistent",
    }


def test_canonical_form() -> None:
    assert spec().canonical() == (
        '{"arch":"sm90","dtype":"bf16","head_dim":{"qk":128,"v":128},"op":"fmha_fwd"}'
    )
    assert spec(seqlen=4096, cluster=[2, 1], tile={"kv": 64}).canonical() == (
        '{"arch":"sm90","cluster":[2,1],"dtype":"bf16","head_dim":{"qk":128,"v":128},'
        '"op":"fmha_fwd","seqlen":{"kv":4096,"q":4096},"tile":{"kv":64}}'
    )


def test_digest_is_pinned() -> None:
    """Kernels on disk state it: a change here restamps all of them."""
    assert (
        spec().digest
        == "b7361ebf9ead5360805aa902409b7cc888257a00cc6fd9c5bd649e24289ce91a"
    )


@pytest.mark.parametrize(
    "same",
    [
        {"head_dim": {"qk": 128, "v": 128}},
        {"seqlen": "dynamic"},
        {"seqlen": {"q": "dynamic"}},
        {"heads": {}},
        {"heads": {"q_per_kv": 1}},
        {"mask": "none", "lse": False, "multicast": "none", "schedule": "persistent"},
        {"cluster": [1, 1]},
        {"tile": {}, "stages": {}},
    ],
)
def test_stated_defaults_do_not_change_the_digest(same: dict[str, Any]) -> None:
    assert spec(**same).digest == spec().digest


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp16"},
        {"head_dim": 64},
        {"seqlen": {"q": 1}},
        {"seqlen": {"kv": 1}},
        {"heads": {"q_per_kv": 2}},
        {"mask": "causal"},
        {"lse": True},
        {"cluster": [2, 1]},
        {"tile": {"q": 128}},
        {"stages": {"q": 1}},
    ],
)
def test_meaning_changes_the_digest(other: dict[str, Any]) -> None:
    assert spec(**other).digest != spec().digest


@pytest.mark.parametrize("n", [32, 80, 128, 256])
def test_a_number_is_both_head_dims(n: int) -> None:
    assert spec(head_dim=n) == spec(head_dim={"qk": n, "v": n})


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_dim": 72},
        {"head_dim": {"qk": 128, "v": 272}},
        {"head_dim": True},
        {"cluster": [True, 1]},
        {"cluster": [2, 2]},
        {"cluster": [2]},
        {"stages": {"q": True}},
        {"stages": {"q": 1.0}},
        {"lse": 1},
        {"seqlen": 0},
        {"seqlen": 2**24 + 1},
        {"seqlen": None},
        {"tile": None},
        {"multicast": "k"},
        {"cluster": [1, 2]},
        {"extra": 1},
    ],
)
def test_the_model_itself_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec(**wrong)


def test_the_model_is_frozen() -> None:
    with pytest.raises(ValidationError):
        spec().mask = "causal"  # type: ignore[misc]


def test_locate_falls_back_to_what_holds_the_field(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(
        "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\nstages: {kv: 2}\n",
        "utf-8",
    )
    (loaded,) = load_specs([file])
    path = str(file)
    assert loaded.stem == "one"
    assert loaded.text == file.read_text("utf-8")
    assert loaded.locate("stages", "kv") == Location(path, 5, 14)
    assert loaded.locate("stages", "q") == Location(path, 5, 9)
    assert loaded.locate("head_dim", "v") == Location(path, 4, 11)
    assert loaded.locate("tile", "kv") == Location(path, 1, 1)
    assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_specs_are_sorted_by_stem_not_by_path(tmp_path: Path) -> None:
    for name in ("a/second.yaml", "b/first.yaml"):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(
            "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n", "utf-8"
        )
    loaded = load_specs([tmp_path / "a", tmp_path / "b"])
    assert [one.stem for one in loaded] == ["first", "second"]


def test_schema_states_what_is_accepted() -> None:
    stated = schema()
    fields = stated["properties"]
    assert stated["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert stated["title"] == "fmha-gen spec"
    assert stated["required"] == list(MINIMAL)
    assert stated["additionalProperties"] is False
    assert all(field["description"] for field in fields.values())
    assert fields["dtype"]["enum"] == ["bf16", "fp16", "e4m3"]
    assert fields["cluster"]["enum"] == [[1, 1], [2, 1], [1, 2]]
    number, pair = fields["head_dim"]["anyOf"]
    assert (number["minimum"], number["maximum"], number["multipleOf"]) == (32, 256, 16)
    assert pair == {"$ref": "#/$defs/HeadDims"}
    kv = stated["$defs"]["TileRows"]["properties"]["kv"]
    assert (kv["minimum"], kv["maximum"], kv["multipleOf"]) == (16, 256, 16)
    assert "null" not in str(stated) and "None" not in str(stated)
    for block in stated["$defs"].values():
        assert all(field["description"] for field in block["properties"].values())
