# expect: killed at the limit
# check: timeout
while True: pass
