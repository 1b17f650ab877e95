# expect: copies of one's own memory count once per process
# check: default
import os, time
rs = []
for i in range(8):
    r, w = os.pipe(); rs.append(r)
    if os.fork() == 0:
        try: b = b"".join(os.urandom(1 << 10) * 1024 for _ in range(200)); os.write(w, b"1")
        except MemoryError: os.write(w, b"0")
        time.sleep(1.5); os._exit(0)
    os.close(w)
n = sum(os.read(r, 1) == b"1" for r in rs)
if n * 200 > 1024: print("BREACH total MiB", n * 200)
