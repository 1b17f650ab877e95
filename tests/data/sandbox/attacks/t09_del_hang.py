# expect: a hang in a destructor counts
# check: timeout
import time
class A:
    def __del__(self, sleep=time.sleep): sleep(30)
a = A()
