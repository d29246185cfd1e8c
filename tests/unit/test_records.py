# SPDX-License-Identifier: Apache-2.0
import pytest
from fmha_gen import build, manifest, records
from fmha_gen.errors import CheckFailed

A, B = "a" * 64, "b" * 64


def merged(record, rung, body=A, **result):
    return records.merge_rung(
        record, kernel="k", body_sha256=body, rung=rung, result=result
    )


def test_rungs_of_one_body_add_up():
    record = merged(None, "compiled", registers=168)
    assert record["rung"] == "compiled"
    record = merged(record, "validated", cases=25)
    assert record["rung"] == "validated"
    assert record["compiled"] == {"registers": 168, "body_sha256": A}
    record = merged(record, "benchmarked", cells=[])
    assert record["rung"] == "benchmarked"


def test_another_body_drops_what_was_proven_for_the_old_one():
    record = merged(merged(None, "compiled"), "validated")
    record = merged(record, "compiled", body=B)
    assert record["rung"] == "compiled"
    assert "validated" not in record


def test_no_rung_is_claimed_without_the_ones_it_needs():
    assert merged(None, "validated")["rung"] == "rendered"
    assert merged(merged(None, "compiled"), "benchmarked")["rung"] == "compiled"


def test_unknown_rungs_are_refused():
    for rung in ("tested", "rendered"):
        with pytest.raises(ValueError, match="no such rung"):
            merged(None, rung)


def test_staleness_says_why():
    record = merged(None, "compiled")

    def stale(record, kernel="k", body=A):
        return records.staleness(record, kernel=kernel, body_sha256=body)

    assert stale(record) is None
    assert stale(None) == "has no record"
    assert "another body" in stale(record, body=B)
    assert "about k" in stale(record, kernel="j")
    assert "claims a rung" in stale({**record, "rung": "validated"})
    assert "another body" in stale({**record, "validated": {"body_sha256": B}})


def test_round_trip(tmp_path):
    record = merged(None, "compiled", registers=1)
    path = tmp_path / "k.json"
    path.write_text(records.dump(record))
    assert records.load(path) == record
    assert path.read_text().endswith("}\n")
    assert records.load(tmp_path / "none.json") is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"kernel": "k"}', b"\xff"])
def test_damage_is_named(tmp_path, data):
    path = tmp_path / "k.json"
    path.write_bytes(data)
    with pytest.raises(CheckFailed, match=r"k\.json: not a record"):
        records.load(path)


def test_a_lock_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / manifest.FILE).write_bytes(b"\xff")
    with pytest.raises(CheckFailed, match=r"MANIFEST\.lock: not a lock"):
        build._read_lock(tmp_path)
