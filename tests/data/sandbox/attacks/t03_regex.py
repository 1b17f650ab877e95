# expect: catastrophic regular expression is killed
# check: timeout
import re
re.match(r"(a+)+$", "a" * 40 + "b")
