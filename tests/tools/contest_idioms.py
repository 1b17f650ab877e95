"""What solutions of contests do with an ordinary interpreter: programs that read `6 7` on one line and print 13, each in its own way.

`ENDINGS` end in another way than with 13 and status 0. `CALLS` are solutions that are called, with cases of `f` and their states.
"""
# ruff: noqa: E501 (one program per line)

READS = "a, b = map(int, input().split())\n"
ADDS = READS + "print(a + b)\n"
BIG = "import sys, threading\nsys.setrecursionlimit(10**6)\n"

IDIOMS = {
    # streams
    "print": ADDS,
    "own buffer flushed at exit": """
import os, sys
from io import BytesIO, IOBase
class FastIO(IOBase):
    newlines = 0
    def __init__(self, file):
        self._fd, self.buffer = file.fileno(), BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def read(self):
        while True:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, 8192))
            if not b:
                break
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines = 0
        return self.buffer.read()
    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, 8192))
            self.newlines = b.count(b"\\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.read = lambda: self.buffer.read().decode("ascii")
        self.readline = lambda: self.buffer.readline().decode("ascii")
sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
input = lambda: sys.stdin.readline().rstrip("\\r\\n")
a, b = map(int, input().split())
print(a + b)
""",
    "TextIOWrapper over the buffer": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\n" + ADDS,
    "TextIOWrapper over what was detached": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')\n" + ADDS,
    "reconfigured output": "import sys\nsys.stdout.reconfigure(encoding='utf-8', line_buffering=False, write_through=True)\n" + ADDS,
    "reconfigured input": "import sys\nsys.stdin.reconfigure(encoding='latin-1')\n" + ADDS,
    "reconfigured after printing": "import sys\nprint(end='')\nsys.stdout.reconfigure(newline='\\n')\n" + ADDS,
    "wrapped input": "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8')\n" + ADDS,
    "input in memory": "import io, os, sys\nsys.stdin = io.StringIO(os.read(0, 10**6).decode())\n" + ADDS,
    "output in memory": "import io, sys\nsys.stdout = kept = io.StringIO()\n" + ADDS + "sys.__stdout__.write(kept.getvalue())\n",
    "codecs writer": "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer)\n" + ADDS,
    "os.read and os.write": "import os\nos.write(1, b'%d\\n' % sum(map(int, os.read(0, 1 << 20).split())))\n",
    "open(0) and open(1)": "print(sum(map(int, open(0).read().split())), file=open(1, 'w'))\n",
    "open(0, 'rb') and an unflushed open(1)": "out = open(1, 'w', closefd=False)\nout.write(str(sum(map(int, open(0, 'rb').read().split()))))\n",
    "fdopen": "import os\nout = os.fdopen(1, 'w', 1 << 16)\nout.write(str(sum(map(int, os.fdopen(0).read().split()))))\n",
    "a file kept by another module": "import sys\nsys.kept = open(1, 'w', closefd=False)\n" + READS + "print(a + b, file=sys.kept)\n",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))\n",
    "/dev/stdin by pathlib": "import pathlib\nprint(sum(map(int, pathlib.Path('/dev/stdin').read_text().split())))\n",
    "/dev/stdin by os.open": "import os\nprint(sum(map(int, os.read(os.open('/dev/stdin', os.O_RDONLY), 99).split())))\n",
    "/dev/stdout": "import sys\nsys.stdout = open('/dev/stdout', 'w')\n" + ADDS,
    "/proc/self/fd/0": "with open('/proc/self/fd/0', 'rb') as file:\n    print(sum(map(int, file.readline().split())))\n",
    "sys.stdin as an iterator": "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\n",
    "sys.stdin.buffer": "import sys\nread = sys.stdin.buffer.readline\nprint(sum(map(int, read().split())), read().decode())\n",
    "sys.stdin.buffer.raw": "import sys\nprint(sum(map(int, sys.stdin.buffer.raw.read(64).split())))\n",
    "readline for input": "import sys\ninput = sys.stdin.readline\n" + ADDS,
    "partial for print": "import functools, sys\nprint = functools.partial(print, flush=True, file=sys.stdout)\n" + ADDS,
    "writelines": "import sys\n" + READS + "sys.stdout.writelines(map(str, [a + b]))\n",
    "fileinput": "import fileinput\nfor line in fileinput.input():\n    print(sum(map(int, line.split())))\n",
    "sys.__stdout__": "import sys\n" + READS + "sys.__stdout__.write(f'{a + b}')\n",
    "print to standard error": "import sys\nprint('debug', file=sys.stderr)\n" + ADDS,
    "redirect_stdout": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    print('hidden')\n" + ADDS,
    "input beyond the end": ADDS + "try:\n    input()\nexcept EOFError:\n    pass\n",
    "closed output": "import sys\n" + ADDS + "sys.stdout.close()\n",
    "C's printf": "import ctypes\n" + READS + "ctypes.CDLL(None).printf(b'%d', a + b)\n",
    "builtins replaced": "import builtins, sys\nbuiltins.input = lambda: sys.stdin.readline()\n" + ADDS,
    # ends
    "exit()": ADDS + "exit()\nprint('never')\n",
    "quit()": "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n    quit()\nmain()\n",
    "sys.exit(0)": "import sys\n" + ADDS + "sys.exit(0)\n",
    "raise SystemExit": ADDS + "raise SystemExit\n",
    "os._exit after a flush": "import os, sys\n" + ADDS + "sys.stdout.flush()\nos._exit(0)\n",
    "atexit": "import atexit\na = list(map(int, input().split()))\natexit.register(lambda: print(sum(a)))\n",
    "atexit with own output": "import atexit, io, os, sys\nsys.stdout = io.BytesIO()\natexit.register(lambda: os.write(1, "
    "sys.stdout.getvalue()))\n" + READS + "sys.stdout.write(b'%d' % (a + b))\n",
    "__del__": "class A:\n    def __del__(self):\n        print(self.sum)\n" + READS + "kept = A()\nkept.sum = a + b\n",
    "exit in a thread": "import sys, threading\n" + ADDS + "threading.Thread(target=sys.exit).start()\n",
    # imports, names and files
    "main guard": "def main():\n    print(sum(map(int, input().split())))\n\nif __name__ == '__main__':\n    main()\n",
    "sys.exit(main())": "import sys\ndef main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    sys.exit(main())\n",
    "__file__ and argv": "import os, sys\nassert os.path.exists(__file__) and len(sys.argv) == 1\n" + ADDS,
    "getsource": "import inspect\ndef f(a, b): return a + b\nassert 'a + b' in inspect.getsource(f)\nprint(f(*map(int, input().split())))\n",
    "pickle": "import pickle\nclass P:\n    def __init__(self): self.x = 6\nprint(pickle.loads(pickle.dumps(P())).x + 7)\n",
    "dataclass": "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass(order=True)\nclass P:\n    x: int\n    y: int = 7\n"
    "p = P(6)\nprint(p.x + p.y)\n",
    "typing": "from typing import List, NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(a: List[int]) -> int:\n    return sum(a)\n"
    "print(f(list(map(int, input().split()))))\n",
    "doctest and exec": "import doctest\ndoctest.testmod()\nexec('a, b = map(int, input().split())')\nprint(eval('a + b'))\n",
    "temporary files": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write(input())\n    f.seek(0)\n"
    "    print(sum(map(int, f.read().split())))\n",
    "signal": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n" + ADDS,
    "resource": "import resource\nresource.getrlimit(resource.RLIMIT_STACK)\n" + ADDS,
    "gc off": "import gc\ngc.disable()\n" + ADDS,
    "locale": "import locale\nlocale.setlocale(locale.LC_ALL, '')\n" + ADDS,
    # text of the program
    "encoding declared": "# -*- coding: utf-8 -*-\nsumme, größe = map(int, input().split())\nprint(summe + größe)\n",
    "byte-order mark": "\ufeff" + ADDS,
    "CRLF": ADDS.replace("\n", "\r\n"),
    "tabs": "for _ in '1':\n\tif True:\n\t\tprint(sum(map(int, input().split())))\n",
    "no line end at the end": ADDS + "# done",
    # threads and processes
    "big stack": BIG + "threading.stack_size(1 << 27)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\ndef main():\n    f(50000)\n"
    "    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()\n",
    "deep recursion": BIG + "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n" + READS + "print(a + b + f(100000) - 100000)\n",
    "recursion by lru_cache": "import functools, sys\nsys.setrecursionlimit(10**5)\n@functools.lru_cache(None)\ndef f(n):\n"
    "    return 0 if n == 0 else 1 + f(n - 1)\nprint(13 + f(5000) - 5000)\n",
    "pool of 20 threads": "import concurrent.futures, threading\nbarrier = threading.Barrier(20)\ndef f(x):\n    barrier.wait()\n"
    "    return len(bytearray(1 << 20)) >> 20\nwith concurrent.futures.ThreadPoolExecutor(20) as pool:\n"
    "    print(sum(pool.map(f, range(20))) - 7)\n",
    "a thread that prints last": "import threading, time\ndef f():\n    time.sleep(0.05)\n    print(13)\nthreading.Thread(target=f).start()\n",
    "a pool that nobody closed": "import concurrent.futures\npool = concurrent.futures.ThreadPoolExecutor(2)\npool.submit(print, 13)\n",
    "multiprocessing": "import multiprocessing\ndef f(x): return x + 7\nif __name__ == '__main__':\n    with multiprocessing.Pool(2) as pool:\n"
    "        print(pool.map(f, [6])[0])\n",
    "fork": "import os\n" + READS + "if os.fork() == 0:\n    print(a + b)\nelse:\n    os.wait()\n",
    "asyncio": "import asyncio\nasync def main():\n    print(sum(map(int, input().split())))\nasyncio.run(main())\n",
    # numbers
    "integers of 5,000 digits": "a = int('1' * 5000)\nassert len(str(a)) == 5000\n" + ADDS,
    "no limit of digits": "import sys\nsys.set_int_max_str_digits(0)\n" + ADDS,
    "decimals and fractions": "from decimal import Decimal, getcontext\nfrom fractions import Fraction\ngetcontext().prec = 60\n"
    "print(int(Decimal(6) + Fraction(7).numerator))\n",
}

# name: (program, what it prints, its status)
ENDINGS = {
    "a message": ("import sys\nprint(13)\nsys.exit('wrong')\n", "13\n", 1),
    "a status": ("print(13)\nexit(3)\n", "13\n", 3),
    "an exception": ("print(13)\nint('x')\n", "13\n", 1),
    "os._exit without a flush": ("import os\nprint(13)\nos._exit(0)\n", "", 0),
    "detached output": ("import sys\nout = sys.stdout.detach()\nout.write(b'13')\n", "13", 120),
    "output that is no stream": ("import sys\nprint(13)\nsys.stdout = 1\n", "13\n", 120),
    "output that does not flush": ("import sys\nclass S:\n    write = print\n    def flush(self): 1 / 0\nprint(13)\nsys.stdout = S()\n", "13\n", 120),
    "no output": ("import sys\nprint(13)\nsys.stdout = None\nprint(14)\n", "13\n", 0),
    "closed standard error": ("import sys\nsys.stderr.close()\nprint(13)\n", "13\n", 0),
    "a hook that fails": ("import sys\nsys.excepthook = None\nprint(13)\n1 / 0\n", "13\n", 1),
    "atexit that fails": ("import atexit\natexit.register(lambda: 1 / 0)\nprint(13)\n", "13\n", 0),
    "exit in an exit function": ("import atexit, sys\natexit.register(lambda: sys.exit(3))\nprint(13)\n", "13\n", 0),
    "a huge status": ("import sys\nprint(13)\nsys.exit(10**30)\n", "13\n", 255),
    "a name that is no text": ("globals()[1] = 2\nprint(13)\n", "13\n", 0),
    "what no terminal shows": ("print('\\r\\n13 \\x00\\u2028\\ud800'.encode('utf-8', 'replace').decode())\n", "\r\n13 \0\u2028?\n", 0),
    "line ends of the input": ("import sys\nprint(repr(sys.stdin.read()))\n", "'6 7\\n'\n", 0),
}

CALLS = {  # name: (program, cases of f, states)
    "main guard": ("def f(a):\n    return a\nif __name__ == '__main__':\n    f(int(input()))\n", [((1,), 1)], ["passed"]),
    "module-level code runs": ("table = [i * i for i in range(9)]\ndef f(a):\n    return table[a]\n", [((3,), 9)], ["passed"]),
    "names of a judge": (
        "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n        heapq.heapify(a)\n        q = deque([heappop(a)])\n"
        "        return min(q[0], inf, math.inf)\n",
        [(([4, 2],), 2)],
        ["passed"],
    ),
    "builtins stay": ("def f(a):\n    return pow(a, 2, 5), max(a, 1), open.__module__\n", [((3,), (4, 3, "io"))], ["passed"]),
    "exit at the end of the module": ("import sys\ndef f(a):\n    return a\nsys.exit(0)\n", [((1,), 1)], ["passed"]),
    "json replaced": ("import json\njson.dumps = json.loads = None\ndef f(a):\n    return a\n", [((1,), 1)], ["passed"]),
    "nodes of a judge": (
        "class Solution:\n    def f(self, head: Optional[ListNode], root: 'Any' = TreeNode()) -> Optional[ListNode]:\n"
        "        return ListNode(head, ListNode(2)).next.val + root.val\n",
        [((1,), 2)],
        ["passed"],
    ),
    "a judge's name is no answer": ("def g(a):\n    return a\n", [((3,), 3)], ["missing"]),
    "a new Solution each": (
        "class Solution:\n    def __init__(self):\n        self.seen = []\n    def f(self, a):\n        self.seen.append(a)\n        return self.seen\n",
        [((1,), [1]), ((2,), [2])],
        ["passed", "passed"],
    ),
    "static method": ("class Solution:\n    @staticmethod\n    def f(a):\n        return a\n", [((1,), 1)], ["passed"]),
    "recursion": ("class Solution:\n    def f(self, n):\n        return 0 if n == 0 else 1 + self.f(n - 1)\n", [((500,), 500)], ["passed"]),
    "dataclasses and pickle": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: 'int'\ndef f(a):\n    return pickle.loads(pickle.dumps(P(a))).x\n",
        [((1,), 1)],
        ["passed"],
    ),
    "ends in a case": (
        "import sys\ndef f(a):\n    [None, exit, sys.exit, quit, lambda: (_ for _ in ()).throw(KeyboardInterrupt)][a]() if a else 0\n    return a\n",
        [((i,), i) for i in range(5)] + [((0,), 0)],
        ["passed", *["raised"] * 4, "passed"],
    ),
    "values that do not encode": (
        "import sys\nclass A:\n    def __repr__(self): sys.exit()\n    def __str__(self): sys.exit()\nclass E(Exception):\n    __str__ = __repr__ = A.__str__\n"
        "def f(a):\n    if a == 2:\n        raise E\n    return A() if a else 0\n",
        [((0,), 0), ((1,), 1), ((2,), 2), ((0,), 0)],
        ["passed", "raised", "raised", "passed"],
    ),
    "a solution that cannot be made": (
        "class Solution:\n    def __init__(self): 1 / 0\n    def f(self, a): return a\n", [((1,), 1)] * 2, ["raised", "raised"],
    ),
    "dictionaries of collections": (
        "import collections\ndef f(a):\n    d = [collections.Counter, collections.OrderedDict, lambda: collections.defaultdict(int)][a]()\n"
        "    d['x'] = 1\n    return d\n",
        [((i,), {"x": 1}) for i in range(3)],
        ["passed"] * 3,
    ),
    "subclasses": ("class D(dict): pass\nclass I(int): pass\ndef f(a):\n    return [D(), I(1)][a]\n", [((0,), {}), ((1,), 1)], ["wrong"] * 2),
    "long integers": ("def f(a):\n    return a * int('1' * 5000)\n", [((10**6000,), 10**6000 * (10**5000 // 9))], ["passed"]),
}  # fmt: skip
