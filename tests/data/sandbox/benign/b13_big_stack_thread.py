# expect-stdout: "20000"
# stdin: ""
# profile: bare
import sys, threading
sys.setrecursionlimit(1 << 20); threading.stack_size(1 << 27)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
t = threading.Thread(target=lambda: print(f(20000))); t.start(); t.join()
