# expect: no memory of other processes
# check: default
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
class I(ctypes.Structure): _fields_ = [("b", ctypes.c_void_p), ("n", ctypes.c_size_t)]
b = ctypes.create_string_buffer(8); a = I(ctypes.addressof(b), 8); c = I(0x400000, 8)
if l.process_vm_readv(os.getppid(), ctypes.byref(a), 1, ctypes.byref(c), 1, 0) >= 0: print("BREACH vm_readv")
try: open(f"/proc/{os.getppid()}/mem", "rb"); print("BREACH mem")
except OSError: pass
