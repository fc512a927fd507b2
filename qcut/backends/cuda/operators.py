"""Everything that serves an operator on CUDA. Importing this module registers all of it."""

from qcut.ops.registry import import_modules

import_modules("qcut.backends.cuda")
