# expect-stdout: "True True True"
# stdin: ""
# profile: bare
import time
a, p, m = time.time(), time.perf_counter(), time.monotonic(); time.sleep(0.05)
print(0.05 <= time.time() - a < 5, 0.05 <= time.perf_counter() - p < 5, 0.05 <= time.monotonic() - m < 5)
