# expect: no memory files outside the disk's cap
# check: default
import os
try: fd = os.memfd_create("x"); print("BREACH memfd")
except OSError: pass
