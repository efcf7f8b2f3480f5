"""Return of free heap memory to the operating system."""

import subprocess
import sys
from textwrap import dedent

FREEING_SCRIPT = """
    import ctypes, psutil, time
    from tarn.memory import PeriodicTrim

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    SIZE, COUNT = 16_000, 10_000
    blocks = [libc.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    # Keep every tenth block, so that no large contiguous piece is free.
    for number, block in enumerate(blocks):
        if number % 10:
            libc.free(block)
    used = lambda: psutil.Process().memory_full_info().uss / 1e6
    before = used()
    with PeriodicTrim(every=0.01):
        until = time.monotonic() + 30
        while used() > before - 80 and time.monotonic() < until:
            time.sleep(0.01)
    print(before - used())
"""


def test_freed_memory_in_small_pieces_is_returned_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", dedent(FREEING_SCRIPT)], capture_output=True, text=True, check=True)
    assert float(result.stdout) > 80
