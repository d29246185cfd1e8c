# SPDX-License-Identifier: Apache-2.0
"""Any input is a spec or a report: never another exception, never a partial answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from fmha_gen.errors import CODES, SpecError
from fmha_gen.spec.model import Spec, SpecFile, load_specs
from fmha_gen.spec.names import contradictions, stem_violations, suggestion
from hypothesis import example, given, settings
from hypothesis import strategies as st

# No deadline: the machine may be busy, and slowness is not what these tests are about.
thorough = settings(deadline=None, max_examples=150)


def load_bytes(raw: bytes, stem: str = "candidate") -> SpecFile | SpecError:
    """Return what becomes of a file with these bytes; its diagnostics lie inside the file."""
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{stem}.yaml")
        file.write_bytes(raw)
        try:
            (spec,) = load_specs([file])
        except SpecError as error:
            assert error.diagnostics
            assert all(line.isprintable() for line in str(error).split("\n"))
            lines = raw.decode("utf-8", errors="replace").splitlines() or [""]
            for diagnostic in error.diagnostics:
                assert diagnostic.code in CODES
                assert diagnostic.location.path == str(file)
                assert 1 <= diagnostic.location.line <= len(lines) + 1
                assert diagnostic.location.column >= 1
            return error
    return spec


def with_lengths_for_window(fields: dict[str, Any]) -> dict[str, Any]:
    """Lengths that are open where there is a window, which a short one would make idle."""
    left_out = {"seqlen"} if fields.get("window") else set()
    return {key: value for key, value in fields.items() if key not in left_out}


# --- valid specs, as the data a file holds ----------------------------------

length = st.integers(1, 2**24) | st.just("dynamic")
width = st.integers(2, 16).map(lambda n: 16 * n)
head_dim = width | st.fixed_dictionaries({"qk": width, "v": width})
group = st.integers(1, 64).map(lambda n: {"q_per_kv": 2 * n})
optional = {
    "seqlen": length | st.fixed_dictionaries({}, optional={"q": length, "kv": length}),
    "heads": group | st.just({}),
    "mask": st.sampled_from(["none", "causal"]),
    "window": st.fixed_dictionaries({}, optional={"left": st.integers(0, 2**24)}),
    "softcap": st.just("none") | st.integers(1, 10**6) | st.floats(0.001, 10**6),
    "lse": st.booleans(),
    "tile": st.fixed_dictionaries(
        {},
        optional={
            "q": st.sampled_from([128, 192]),
            "kv": st.integers(1, 16).map(lambda n: 16 * n),
        },
    ),
    "stages": st.fixed_dictionaries(
        {}, optional={"q": st.integers(1, 2), "kv": st.integers(2, 8)}
    ),
    "schedule": st.just("persistent"),
}
required = {
    "arch": st.just("sm90"),
    "op": st.just("fmha_fwd"),
    "dtype": st.sampled_from(["bf16", "fp16"]),
    "head_dim": head_dim,
}
sharing = st.sampled_from([{}, {"cluster": [1, 1]}]) | st.fixed_dictionaries(
    {"cluster": st.just([2, 1])},
    optional={"multicast": st.sampled_from(["none", "k", "v", "kv"])},
)
packing = st.sampled_from([{}, {"pack_gqa": False}]) | st.fixed_dictionaries(
    {"pack_gqa": st.just(True), "heads": group}
)
valid = st.builds(
    lambda fields, shared, packed: fields | shared | packed,
    st.fixed_dictionaries(required, optional=optional).map(with_lengths_for_window),
    sharing,
    packing,
)

# --- anything else -----------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.dates()
    | st.sampled_from(["bf16", "dynamic", "yes", "0x10", "1:30", "<<", "="])
)
words = st.sampled_from(
    [*required, *optional, "pack_gqa", "q", "kv", "qk", "v", "q_per_kv", "tiel", "1"]
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(words | scalars, inner, max_size=5),
    max_leaves=20,
)
yaml_like = st.text(
    st.sampled_from("arch: sm90{}[],-\n  ?&*!|>'\"%@#\t0x_<~.") | st.characters()
)


def dumped(tree: Any) -> bytes:
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode(
        "utf-8", "replace"
    )


@thorough
@given(st.binary(max_size=200))
@example(b"\xff\xfea\x00")
@example(b"[" * 5000)
@example(b"? " * 3000)
@example(b"a: " + b"9" * 5000)
@example(b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1\n")
@example(b'a: "\\UFFFFFFFF"\n')
def test_bytes(raw: bytes) -> None:
    load_bytes(raw)


@thorough
@given(yaml_like)
@example("a: &a [*a]")
@example("&a a: *a")
@example("!!python/object/apply:os.system [ls]")
@example("--- !!map\n{}")
@example("a: 190:20:30.15\nb: 1_000.5\nc: .nan\n")
@example("arch: !!null\n? [a, b]\n: 1\n")
def test_text(text: str) -> None:
    load_bytes(text.encode("utf-8", "replace"))


@thorough
@given(trees)
def test_trees(tree: Any) -> None:
    load_bytes(dumped(tree))


@thorough
@given(valid)
def test_valid_specs_load(data: dict[str, Any]) -> None:
    loaded = load_bytes(dumped(data))
    assert isinstance(loaded, SpecFile), str(loaded)
    assert loaded.spec == Spec.model_validate(data)
    for field in data:
        lines = loaded.text.splitlines()
        assert lines[loaded.locate(field).line - 1].startswith(
            (f"{field}:", "  ", "- ")
        )


@thorough
@given(valid, st.data())
def test_mutated_specs(data: dict[str, Any], draw: st.DataObject) -> None:
    """One field replaced by anything: the report is about it, or about a rule it takes part in."""
    field = draw.draw(st.sampled_from(sorted(data)))
    before = data[field]
    data[field] = draw.draw(
        trees | st.sampled_from(["bf61", "casual", 100, [2, 2], [1, 2], {}])
    )
    outcome = load_bytes(dumped(data))
    if isinstance(outcome, SpecFile):
        assert outcome.spec == Spec.model_validate(data)
    else:
        assert data[field] != before or isinstance(before, bool)


@thorough
@given(valid, st.sampled_from(sorted(required)))
def test_missing_key(data: dict[str, Any], field: str) -> None:
    del data[field]
    outcome = load_bytes(dumped(data))
    assert isinstance(outcome, SpecError)
    (only,) = outcome.diagnostics
    assert (only.code, only.location.line, only.location.column) == ("FG102", 1, 1)
    assert field in only.message


@thorough
@given(valid, st.randoms(use_true_random=False))
def test_canonical_form(data: dict[str, Any], shuffle: random.Random) -> None:
    """It round-trips, and neither order nor comments nor spelled-out defaults change it."""
    spec = Spec.model_validate(data)
    canonical = spec.canonical()
    again = Spec.model_validate(json.loads(canonical))
    assert again == spec
    assert again.canonical() == canonical

    full = spec.model_dump(mode="json")
    for planned in ("tile", "stages"):
        full[planned] = {key: n for key, n in full[planned].items() if n is not None}
    keys = list(full)
    shuffle.shuffle(keys)
    spelled_out = b"# All of it.\n" + dumped({key: full[key] for key in keys})
    loaded = load_bytes(spelled_out)
    assert isinstance(loaded, SpecFile), str(loaded)
    assert loaded.digest == spec.digest


@thorough
@given(valid, valid)
def test_digests_tell_specs_apart(one: dict[str, Any], two: dict[str, Any]) -> None:
    first, second = Spec.model_validate(one), Spec.model_validate(two)
    assert (first.digest == second.digest) == (first == second)


@thorough
@given(
    st.lists(st.tuples(valid, st.booleans()), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
)
def test_many_files(
    cases: list[tuple[dict[str, Any], bool]], shuffle: random.Random
) -> None:
    """All diagnostics of all files at once, in an order that is not that of the arguments."""
    with TemporaryDirectory() as folder:
        paths = []
        for i, (data, bad) in enumerate(cases):
            file = Path(folder, f"case_{i}.yaml")
            file.write_bytes(dumped(data | {"oops": 1, "dtype": 3} if bad else data))
            paths.append(file)
        expected = {
            str(path) for path, (_, bad) in zip(paths, cases, strict=True) if bad
        }
        shuffled = [*paths, Path(folder)]
        shuffle.shuffle(shuffled)
        outcomes = []
        for given_paths in (paths, shuffled, [folder]):
            try:
                outcomes.append([spec.stem for spec in load_specs(given_paths)])
            except SpecError as error:
                outcomes.append(str(error).splitlines())
                assert {one.location.path for one in error.diagnostics} == expected
                assert len(error.diagnostics) == 2 * len(expected)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    if not expected:
        assert outcomes[0] == [path.stem for path in paths]


TOKENS = (
    "x pack sm90 sm100 sm90a d64 d128 d192x128 d128x128 bf16 fp16 fp8 causal full mha mqa gqa gqa4"
    " lse nolse s4096 dyn q4096 kv1 c1x1 c2x1 c1x2 mck mcv mckv kvmc t128x64 t192x128 fast v2"
)
tokens = st.sampled_from(TOKENS.split())


@thorough
@given(valid, st.lists(tokens, min_size=1, max_size=6).map("_".join))
def test_suggested_names_are_true(data: dict[str, Any], stem: str) -> None:
    spec = Spec.model_validate(data)
    better = suggestion(stem, spec)
    untrue = contradictions(stem, spec)
    if better:
        assert not contradictions(better, spec)
        assert not stem_violations(better)
        assert all(better in violation.hint for violation in untrue)
    outcome = load_bytes(dumped(data), stem)
    reported = len(outcome.diagnostics) if isinstance(outcome, SpecError) else 0
    assert reported == len(set(untrue))
