# expect: no POSIX or SysV queues
# check: default
import ctypes
l = ctypes.CDLL(None, use_errno=True)
if l.msgget(0x5B5C, 0o1600) >= 0: print("BREACH msgget")
if l.semget(0x5B5D, 1, 0o1600) >= 0: print("BREACH semget")
