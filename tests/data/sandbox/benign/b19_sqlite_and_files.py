# expect-stdout: "[(3,)] ['a.db']"
# stdin: ""
# profile: bare
import os, sqlite3
c = sqlite3.connect("a.db"); c.execute("create table t (x)"); c.executemany("insert into t values (?)", [(1,), (2,)]); c.commit()
print(c.execute("select sum(x) from t").fetchall(), os.listdir("."))
