# expect: a value that contains itself is no pass and no crash
# check: judge
def solve(x):
    a = []; a.append(a); return a
