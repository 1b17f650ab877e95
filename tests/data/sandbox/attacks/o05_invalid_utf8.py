# expect: bytes that are not UTF-8 are data
# check: default
import sys
sys.stdout.buffer.write(b"\xff\xfe\x80abc\xc3")
