# expect: processes are capped and die (self-bounded at 300)
# check: default
import ctypes
ctypes.CDLL(None).prctl(15, b"sbxatk")
import os, time
n = 0
try:
    for _ in range(300):
        if os.fork() == 0: time.sleep(20); os._exit(0)
        n += 1
except OSError: pass
if n >= 300: print("BREACH forked", n)
