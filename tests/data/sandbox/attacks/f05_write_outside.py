# expect: nothing writable but work, tmp and shm
# check: default
import os
for p in ("/", "/etc", "/usr", "/usr/lib", "/opt", "/home", "/dev"):
    try: open(p+"/sbx_w", "w").close(); os.remove(p+"/sbx_w"); print("BREACH wrote below", p)
    except OSError: pass
