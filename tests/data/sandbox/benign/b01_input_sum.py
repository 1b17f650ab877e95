# expect-stdout: "19999900000"
# stdin: "@"
# profile: bare
print(sum(map(int, input().split())))
