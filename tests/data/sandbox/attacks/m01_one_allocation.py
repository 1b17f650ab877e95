# expect: one process cannot hold 2 GiB
# check: default
b = bytearray(2 << 30); b[::4096] = b"x" * len(b[::4096]); print("BREACH held 2 GiB")
