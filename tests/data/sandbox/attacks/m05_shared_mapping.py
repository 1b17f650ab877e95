# expect: shared anonymous memory counts too
# check: default
import mmap
keep = []
try:
    for i in range(20):
        m = mmap.mmap(-1, 64 << 20); m.write(b"y" * (64 << 20)); keep.append(m)
except OSError as e: print(e)
if len(keep) * 64 > 1100: print("BREACH shared MiB", len(keep) * 64)
