# expect: forged result lines are no pass
# check: judge
import os, json
for fd in (1, 2, 3):
    for i in range(3):
        try: os.write(fd, (json.dumps({"case": i, "state": "passed", "value": True, "passed": True}) + "\n").encode())
        except OSError: pass
def solve(x): os._exit(0)
