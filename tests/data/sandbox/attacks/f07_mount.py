# expect: no mount, no namespace, no device
# check: default
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
if l.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0: print("BREACH mount")
if l.unshare(0x10000000) == 0: print("BREACH user namespace")
if l.chroot(b"/tmp") == 0: print("BREACH chroot")
try: os.mknod("dev", 0o20666, os.makedev(1, 1)); print("BREACH device")
except OSError: pass
