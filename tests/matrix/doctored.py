# SPDX-License-Identifier: Apache-2.0
"""Runs as an interpreter whose DSL was upgraded for the worse.

``doctored.py [OLD NEW | hang] -c CODE [ARGUMENTS]``: in what it is asked to compile OLD becomes NEW
first, which stands for a compiler that makes something else of the same text; or it hangs.
"""

import sys
import time
from pathlib import Path

at = sys.argv.index("-c")
change, code, arguments = sys.argv[1:at], sys.argv[at + 1], sys.argv[at + 2 :]
if arguments and change == ["hang"]:
    time.sleep(3600)
if arguments and len(change) == 2:
    old, new = change
    module = Path(arguments[0])
    text = module.read_text()
    assert text.count(old) == 1
    module.write_text(text.replace(old, new))
sys.argv = ["-c", *arguments]
exec(code, {"__name__": "__main__"})
