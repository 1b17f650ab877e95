# expect: no names are looked up
# check: default
import socket
try: socket.getaddrinfo("example.org", 80); print("BREACH lookup")
except OSError: pass
