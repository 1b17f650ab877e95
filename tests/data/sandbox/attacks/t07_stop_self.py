# expect: a stopped program is killed at the limit
# check: timeout
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
