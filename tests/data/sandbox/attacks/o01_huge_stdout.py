# expect: stdout capped
# check: default
import sys
for _ in range(200): sys.stdout.write("y" * (1 << 20))
