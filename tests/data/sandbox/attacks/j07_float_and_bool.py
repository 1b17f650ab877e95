# expect: another type is not the value
# check: judge one
def solve(x): return True
