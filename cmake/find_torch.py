"""Print the directory of the torch to build against, or nothing.

First the torch this interpreter imports. An isolated build (plain `pip install -e .`) hides it, so then the one in the
environment's own site-packages: that is the torch the extension will run with.
"""

import importlib.util
import sysconfig
from pathlib import Path

spec = importlib.util.find_spec("torch")
beside = Path(sysconfig.get_paths()["purelib"]) / "torch"
if spec is not None and spec.origin is not None:
    print(Path(spec.origin).parent)
elif (beside / "version.py").is_file():
    print(beside)
