# expect: no hard link to a host file
# check: default
import os
for p in ("/tmp/sbx_canary/secret.txt", "/etc/hostname"):
    try: os.link(p, "here"); print("BREACH link", p)
    except OSError: pass
