# expect: no connection to the host's loopback
# check: default
import socket
for fam, a in ((socket.AF_INET, ("127.0.0.1", 45454)), (socket.AF_INET6, ("::1", 45454))):
    try: s = socket.socket(fam); s.settimeout(1); s.connect(a); print("BREACH connected", a)
    except OSError: pass
