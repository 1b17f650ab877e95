# expect: killed at the limit with bounded output
# check: timeout
while True: print("x" * 1000)
