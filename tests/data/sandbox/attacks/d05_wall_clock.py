# expect: the wall clock repeats
# check: same
import time
print(time.time(), time.time_ns(), time.perf_counter(), time.ctime(time.time()))
