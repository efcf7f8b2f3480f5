import subprocess
import sys
from textwrap import dedent

HOLDING = """
    import ctypes, psutil, time
    from tarn.memory import GivingBack

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    SIZE, COUNT = 16_000, 10_000
    blocks = [libc.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    # Every tenth one stays, so that nothing large is free in one piece.
    for number, block in enumerate(blocks):
        if number % 10:
            libc.free(block)
    own = lambda: psutil.Process().memory_full_info().uss / 1e6
    before = own()
    with GivingBack(every=0.01):
        until = time.monotonic() + 30
        while own() > before - 80 and time.monotonic() < until:
            time.sleep(0.01)
    print(before - own())
"""


def test_freed_memory_in_pieces_goes_back_to_the_system() -> None:
    found = subprocess.run([sys.executable, "-c", dedent(HOLDING)], capture_output=True, text=True, check=True)
    assert float(found.stdout) > 80
