# expect: os._exit(0) is not a pass
# check: judge
import os
def solve(x): os._exit(0)
