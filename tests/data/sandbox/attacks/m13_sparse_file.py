# expect: no file larger than the disk's cap
# check: default
try:
    f = open("sparse", "wb"); f.truncate(1 << 30); print("BREACH sparse GiB")
except OSError as e: print(e)
