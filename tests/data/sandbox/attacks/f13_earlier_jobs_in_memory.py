# expect: nothing of an earlier execution in memory
# check: default
data = ["".join(["answer-", "of-the-", "previous-", "job"]) * 1000 for _ in range(50)]
# ---- phase 2
import ctypes
l = ctypes.CDLL(None)
needle = b"answer-" + b"of-the-"
needle += b"previous-" + b"job" + needle
start, vec = id(object()) & ~0xFFFFF, ctypes.create_string_buffer(1)
for page in range(start - (32 << 20), start + (32 << 20), 4096):
    if l.mincore(ctypes.c_void_p(page), ctypes.c_size_t(4096), vec) == 0:
        found = ctypes.string_at(page, 4096)
        if found.count(needle) > 9: print("BREACH earlier job"); break
