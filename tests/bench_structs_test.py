# SPDX-License-Identifier: Apache-2.0
"""The bench's copies of the C structs are as large as the library's own. usage: bench_structs_test.py BENCH_FOLDER SHARED_LIBRARY"""

import ctypes
import sys

sys.path.insert(0, sys.argv[1])
from leanattn_structs import Options, Problem  # noqa: E402

library = ctypes.CDLL(sys.argv[2])
for name, struct in (("problem", Problem), ("options", Options)):
    init = getattr(library, f"leanattn_{name}_init_sized")
    init.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = ctypes.sizeof(struct)
    room = ctypes.create_string_buffer(size + 64)
    # The library takes its own size and larger ones, never a smaller one.
    assert init(room, size) == 0, f"leanattn_{name} is larger than the bench's {size} bytes"
    assert init(room, size - 1) != 0, f"leanattn_{name} is smaller than the bench's {size} bytes"
