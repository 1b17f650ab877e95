# expect: no socket of the host by path
# check: default
import socket
try: s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect("/tmp/sbx_canary/h.sock"); print("BREACH unix path")
except OSError: pass
