# expect: no accounts, keys or homes of the host
# check: default
import os
for p in ("/etc/shadow", "/root/.ssh", "/root/.bashrc", "/etc/ssh", "/etc/machine-id", "/var/log", "/etc/fstab"):
    try: print("BREACH", p, os.listdir(p) if os.path.isdir(p) else open(p).read(1))
    except OSError: pass
