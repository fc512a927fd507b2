"""transformers knows qcut, whichever is imported first, and at no cost where it is not used."""

from __future__ import annotations

from tests.support.processes import run, run_each

KNOWN = """
from transformers.quantizers import auto
known = auto.AUTO_QUANTIZER_MAPPING["qcut"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["qcut"]
assert known[1] is qcut.QcutConfig, known
assert known[0].__name__ == "QcutHfQuantizer"
print(list(auto.AUTO_QUANTIZER_MAPPING).count("qcut"))
"""


RELOADING = "import qcut\nfrom importlib import reload\nfrom transformers.quantizers import auto\n"
THREADS = """
import sys, threading, time
name = "transformers.quantizers.auto"
thread = threading.Thread(target=__import__, args=(name,))
thread.start()
while name not in sys.modules: time.sleep(1e-4)
import qcut
thread.join()
"""


ORDERS = (
    "from transformers.quantizers import auto\nimport qcut",
    "import qcut\nfrom transformers.quantizers import auto",
    THREADS,
    f"{RELOADING}reload(auto)\nreload(qcut)\nreload(auto)",
)


def test_the_order_of_imports_does_not_matter() -> None:
    assert run_each("import torch.distributed.tensor", [imports + KNOWN for imports in ORDERS]) == ["1"] * len(ORDERS)


def test_importing_qcut_imports_neither_torch_nor_transformers() -> None:
    code = "import qcut, sys; print([m for m in ('torch', 'transformers', 'qcut.integrations') if m in sys.modules])"
    assert run(code) == "[]"


def test_one_finder_whatever_is_reloaded() -> None:
    code = "import qcut, sys, importlib\nfor _ in range(3): importlib.reload(qcut)\n"
    assert run(code + "print([type(f).__name__ for f in sys.meta_path].count('_QcutFinder'))") == "1"
