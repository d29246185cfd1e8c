# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from fmha_gen.build import device_code

PTX = "// a compiler\n.version {}\n.target sm_90a\n.entry k_0() {{ ret; }}\n"


def test_who_wrote_it_is_no_part_of_the_code():
    code = device_code.digest(PTX.format("8.8"))
    assert code == device_code.digest(PTX.format("9.4"))
    assert code == device_code.digest(
        PTX.format("8.8").replace("a comp", "another comp")
    )
    assert code != device_code.digest(PTX.format("8.8").replace("90a", "90"))
    assert code != device_code.digest(PTX.format("8.8").replace("ret", "exit"))
    assert device_code.digest("ret;") != device_code.digest("exit;")


@pytest.mark.parametrize("version", ["8.8", "9.4"])
def test_what_is_kept_of_one_module(tmp_path, version):
    assert device_code.kept(tmp_path) == {}
    (tmp_path / "k.sm_90a.ptx").write_text(PTX.format(version))
    (tmp_path / "k.sm_90a.cubin").write_text("")
    code = device_code.digest(PTX.format("9.0"))
    assert device_code.kept(tmp_path) == {"ptx_sha256": code, "ptx_version": version}
    (tmp_path / "l.sm_90a.ptx").write_text(PTX.format(version))
    assert device_code.kept(tmp_path) == {}


def test_the_dsl_is_asked_to_keep_it(tmp_path, monkeypatch):
    for name in ("CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR"):
        monkeypatch.setenv(name, "of the user")
    device_code.keep(tmp_path)
    asked = os.environ["CUTE_DSL_KEEP"], os.environ["CUTE_DSL_DUMP_DIR"]
    assert asked == ("ptx", str(tmp_path))
