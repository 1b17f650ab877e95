# expect: set order and hashes repeat
# check: same
print({"a", "b", "c", "d", "e"}, hash("x"))
