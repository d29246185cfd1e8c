# SPDX-License-Identifier: Apache-2.0
import pytest
from fmha_gen.build import manifest
from fmha_gen.errors import CheckFailed

TOOLS = manifest.tools_line(fmha_gen="1", black="2", jinja2=">=3", dsl=">=4,<5")
LOCK = manifest.Manifest(
    TOOLS,
    {
        "b.py": manifest.Entry("1" * 64, "2" * 64, "3" * 64),
        "a.py": manifest.Entry("4" * 64, "5" * 64, "6" * 64),
    },
)


def test_round_trip_is_sorted():
    text = manifest.dump(LOCK)
    assert manifest.parse(text) == LOCK
    assert [line.split(" ")[0] for line in text.splitlines()[1:]] == ["a.py", "b.py"]
    assert text.startswith("fmha-gen==1 black==2 jinja2>=3 nvidia-cutlass-dsl>=4,<5\n")


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda t: "", "not a lock"),
        (lambda t: t.rstrip("\n"), "not a lock"),
        (lambda t: "<<<<<<< ours\n" + t, "not a lock"),
        (lambda t: t + "=======\n", "MANIFEST.lock:4: not an entry"),
        (lambda t: t.replace("b.py", "a.py"), "MANIFEST.lock:3: not an entry"),
        (lambda t: t.replace("a.py", "../a.py"), "MANIFEST.lock:2: not an entry"),
    ],
)
def test_damage_is_placed(damage, where):
    with pytest.raises(CheckFailed, match=where):
        manifest.parse(damage(manifest.dump(LOCK)))
