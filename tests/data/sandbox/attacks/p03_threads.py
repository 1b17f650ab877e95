# expect: threads are capped (self-bounded at 500)
# check: default
import threading, time
n = 0
try:
    for _ in range(500): threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); n += 1
except RuntimeError: pass
if n >= 500: print("BREACH threads", n)
