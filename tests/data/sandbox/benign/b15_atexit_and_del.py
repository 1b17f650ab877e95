# expect-stdout: "main\nexit\ndel"
# stdin: ""
# profile: bare
import atexit
class A:
    def __del__(self): print("del")
a = A(); atexit.register(print, "exit"); print("main")
