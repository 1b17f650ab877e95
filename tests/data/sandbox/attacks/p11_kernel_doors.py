# expect: no io_uring, bpf, userfaultfd, keyring, perf
# check: default
import ctypes
l = ctypes.CDLL(None, use_errno=True)
for n, a in ((425, (1, ctypes.create_string_buffer(200))), (321, (0, 0, 0)), (323, (0,)), (250, (0, -3, 1)), (298, (0, 0, -1, -1, 0))):
    if l.syscall(n, *a) >= 0: print("BREACH syscall", n)
