# expect: unseeded generators repeat
# check: same
import random, secrets, tempfile, os
print(random.random(), random.Random().random(), secrets.token_hex(4), os.urandom(4).hex(), open("/dev/urandom", "rb").read(4).hex())
