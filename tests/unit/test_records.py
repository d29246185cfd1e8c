# SPDX-License-Identifier: Apache-2.0
import pytest
from fmha_gen.build import engine, manifest, records
from fmha_gen.errors import CheckFailed

A, B = "a" * 64, "b" * 64


H100, H200 = "NVIDIA H100", "NVIDIA H200"
CODE = {"dsl": "4.8.1", "ptx_sha256": "p", "launch_sha256": "l", "host_sha256": "h"}
CELL = {"graph_tflops": 700, "eager_tflops": 650, "host_us": 14, "peers": {}}


def merged(record, rung, body=A, **result):
    if rung in records.ON_GPUS:
        result = {"gpu": H200, **result}
    return records.merge_rung(
        record, kernel="k", body_sha256=body, rung=rung, result=result
    )


def proven(*gpus):
    """A record of a kernel that was emulated, validated and benchmarked."""
    record = merged(None, "compiled", **CODE)
    record = merged(record, "emulated", dsl="4.8.1", ptx_sha256="p")
    for gpu in gpus or (H200,):
        ran = {"dsl": "4.8.1", "ptx_sha256": "p", "ptx_version": "9.4"}
        record = merged(record, "validated", gpu=gpu, **ran, misuses=57)
        versions = {"dsl": "4.8.1"}
        record = merged(record, "benchmarked", gpu=gpu, versions=versions, cells=[CELL])
    assert record["rung"] == "benchmarked"
    return record


def test_rungs_of_one_body_add_up():
    record = merged(None, "compiled", registers=168)
    assert record["rung"] == "compiled"
    record = merged(record, "validated", cases=25)
    assert record["rung"] == "validated"
    assert record["compiled"] == {"registers": 168, "body_sha256": A}
    record = merged(record, "benchmarked", cells=[])
    assert record["rung"] == "benchmarked"


def test_what_ran_names_the_code_that_ran():
    record = proven()
    for entry in (record["emulated"], *record["validated"], *record["benchmarked"]):
        assert entry["body_sha256"] == A
        assert [entry[name] for name in (*records.DEVICE, records.HOST)] == [*"plh"]


def test_a_text_that_compiles_to_the_same_keeps_what_ran():
    before = proven()
    after = merged(before, "compiled", body=B, **CODE)
    assert after["body_sha256"] == after["compiled"]["body_sha256"] == B
    for rung in (*records.ABOVE_BUILD, "rung"):
        assert after[rung] == before[rung]  # the text that ran is still named
    assert records.staleness(after, kernel="k", body_sha256=B) is None
    # A third text of that code, and the first one again.
    assert merged(after, "compiled", body="c" * 64, **CODE)["rung"] == "benchmarked"
    assert merged(after, "compiled", **CODE) == before


@pytest.mark.parametrize("name", records.DEVICE)
def test_other_code_or_another_launch_drops_what_ran(name):
    for digest in ("other", ""):
        after = merged(proven(), "compiled", body=B, **CODE | {name: digest})
        assert after["rung"] == "compiled"
        assert not after.keys() & set(records.ABOVE_BUILD)


def test_what_is_not_known_of_two_texts_is_not_alike():
    record = merged(None, "compiled", dsl="4.8.1")
    record = merged(record, "validated", dsl="4.8.1")
    assert merged(record, "compiled", body=B, dsl="4.8.1")["rung"] == "compiled"


def test_another_host_section_drops_what_is_about_it_alone():
    after = merged(proven(), "compiled", body=B, **CODE | {"host_sha256": "i"})
    assert after["rung"] == "benchmarked"
    assert "misuses" not in after["validated"][0]
    assert after["benchmarked"][0]["cells"] == [{"graph_tflops": 700, "peers": {}}]


def test_a_compile_today_of_the_text_that_ran_tells_what_it_was():
    """As where the calls that a launch is known by change, or a record is of before them."""
    record = proven()
    for entry in (record["emulated"], *record["validated"], *record["benchmarked"]):
        for name in ("launch_sha256", records.HOST):
            entry.pop(name)
    assert merged(record, "compiled", **CODE) == proven()
    again = merged(proven(), "compiled", **CODE | {"launch_sha256": "m"})
    assert again["validated"][0]["launch_sha256"] == "m"
    assert again["rung"] == "benchmarked"
    carried = merged(proven(), "compiled", body=B, **CODE)
    later = merged(carried, "compiled", body=B, **CODE | {"launch_sha256": "m"})
    assert later["rung"] == "benchmarked"
    assert later["validated"][0]["body_sha256"] == A
    other = CODE | {"launch_sha256": "m", "ptx_sha256": "q"}
    assert merged(carried, "compiled", body=B, **other)["rung"] == "compiled"


def test_what_ran_by_another_dsl_is_about_its_text_alone():
    record = merged(proven(), "validated", dsl="4.8.2", cases=3)
    (entry,) = record["validated"]
    assert entry == {"gpu": H200, "dsl": "4.8.2", "cases": 3, "body_sha256": A}
    assert record["rung"] == "benchmarked"
    assert "validated" not in merged(record, "compiled", body=B, **CODE)
    code = merged(proven(), "emulated", dsl="4.8.1", ptx_sha256="q")["emulated"]
    assert code.keys() == {"dsl", "ptx_sha256", "body_sha256"}


def test_a_validation_that_does_not_know_its_code_is_about_its_text_alone():
    record = merged(proven(), "validated", dsl="4.8.1", cases=3)
    (entry,) = record["validated"]
    assert entry == {"gpu": H200, "dsl": "4.8.1", "cases": 3, "body_sha256": A}
    assert merged(record, "compiled", **CODE)["validated"] == [entry]
    assert "validated" not in merged(record, "compiled", body=B, **CODE)


def test_a_benchmark_is_about_the_code_that_was_validated_on_its_gpu():
    record = proven(H100)
    (entry,) = record["benchmarked"]
    assert entry["ptx_version"] == "9.4"
    versions = {"dsl": "4.8.1"}
    other = {"gpu": H200, "dsl": "4.8.1", "ptx_sha256": "q"}
    record = merged(record, "validated", **other)
    record = merged(record, "benchmarked", versions=versions)
    _, entry = record["benchmarked"]
    assert entry["ptx_sha256"] == "q"
    assert not entry.keys() & {"launch_sha256", "ptx_version"}
    record = merged(record, "compiled", body=B, **CODE)
    assert records.gpus(record, "benchmarked") == (H100,)


def test_gpus_stand_beside_each_other():
    record = proven(H200, H100)
    assert records.gpus(record, "validated") == (H100, H200)
    again = merged(record, "validated", gpu=H100, dsl="4.8.1", ptx_sha256="p", cases=9)
    assert [entry.get("cases") for entry in again["validated"]] == [9, None]
    assert merged(again, "compiled", body=B, **CODE)["validated"] == again["validated"]


def test_a_benchmark_stands_on_a_validation_of_the_same_gpu():
    record = merged(merged(None, "compiled"), "validated", gpu=H100)
    assert merged(record, "benchmarked", gpu=H200)["rung"] == "validated"
    assert merged(record, "benchmarked", gpu=H100)["rung"] == "benchmarked"


def test_the_entry_of_a_rung_is_the_worst():
    record = merged(None, "validated", gpu=H100, worst={"of_bound": 0.4})
    record = merged(record, "validated", gpu=H200, worst={"of_bound": 0.5})
    record = merged(record, "validated", gpu="it", worst=None)
    assert records.entry_of(record, "validated")["gpu"] == H200
    assert records.entry_of(record, "emulated") == {}


def test_a_record_of_one_gpu_is_read_as_a_list_of_one():
    entry = {"gpu": H200, "body_sha256": A}
    head = {"kernel": "k", "body_sha256": A, "rung": "validated"}
    found = records.parse(records.dump(head | {"validated": entry}), "k.json")
    assert found["validated"] == [entry]


def test_what_is_no_entry_is_none():
    """Whoever can write the folder can write anything into a record."""
    told = {name: CODE[name] for name in records.DEVICE}
    odd = {"gpu": H100, **told, "cells": {"graph_tflops": 1}}
    record = proven() | {
        "emulated": ["yes"],
        "validated": [None, {"gpu": 1}, {**odd, "cells": [1, CELL]}, odd],
        "benchmarked": {"gpu": H200},
    }
    found = records.current(record, kernel="k", body_sha256=A)
    assert found["rung"] == "validated" and "emulated" not in found
    assert [entry["cells"] for entry in found["validated"]] == [
        [{"graph_tflops": 700, "peers": {}}],
        {"graph_tflops": 1},
    ]
    merged(record, "compiled", body=B, **CODE)


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
    other = [{"gpu": H200, "body_sha256": B}]
    assert "another body" in stale({**record, "validated": other})


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
        engine._read_lock(tmp_path)
