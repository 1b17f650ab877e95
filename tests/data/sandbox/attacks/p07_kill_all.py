# expect: kill(-1) reaches nobody else; the execution ends and the worker lives
# check: default
import os, signal
try: os.kill(-1, 0)
except OSError as e: print(e)
