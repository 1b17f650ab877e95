# expect: a lying subclass in a container never matches
# check: judge
class L(list):
    def __eq__(s, o): return True
def solve(x): return L()
