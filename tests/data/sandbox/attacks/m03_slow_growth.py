# expect: memory is capped below 1.5 GiB whatever the steps
# check: default
keep = []
for i in range(150):
    keep.append(b"x" * (10 << 20))
print("BREACH held", len(keep) * 10)
