# expect-stdout: "[0, 1, 4, 9]"
# stdin: ""
# profile: bare
from concurrent.futures import ProcessPoolExecutor
def f(x): return x * x
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool: print(list(pool.map(f, range(4))))
