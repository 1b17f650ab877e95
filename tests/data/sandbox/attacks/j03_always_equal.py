# expect: an object that equals everything never matches
# check: judge
class T:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
def solve(x): return T()
