"""Everything that serves an operator on the portable path. Importing this module registers all of it."""

from qcut.ops.registry import import_modules
from qcut.portable.triton import required

required()
import_modules("qcut.portable")
