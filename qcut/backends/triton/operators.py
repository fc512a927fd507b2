"""Everything that serves an operator on the Triton back end. Importing this module registers all of it."""

from qcut.backends.triton.launch import required
from qcut.ops.registry import import_modules

required()
import_modules("qcut.backends.triton")
