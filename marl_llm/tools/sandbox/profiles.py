"""What is loaded before a program starts: `bare`, `numpy`, `data_science`."""

import dataclasses
import glob
import importlib.util
import os

from marl_llm.tools.sandbox.limits import SandboxError

STDLIB = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "glob", "hashlib", "heapq", "inspect", "io",
    "itertools", "json", "linecache", "locale", "math", "numbers", "operator", "os", "pickle", "pprint", "queue", "random", "re", "secrets",
    "shutil", "signal", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "traceback", "types",
    "typing", "unittest", "uuid", "warnings",
)  # fmt: skip

PANDAS_AND_SKLEARN = """
import io, numpy as np, pandas as pd
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
frame = pd.read_csv(io.StringIO("a,b,g\\n1,2.5,x\\n2,3.5,y\\n3,4.5,x\\n4,6.5,y\\n5,6,x\\n6,7,y\\n"))
frame.groupby("g").a.sum().to_dict(); frame.describe().to_string(); frame.merge(frame, on="a").to_csv()
x_train, x_test, y_train, y_test = train_test_split(frame[["a", "b"]], frame.g, random_state=0)
make_pipeline(StandardScaler(), LogisticRegression()).fit(frame[["a", "b"]], frame.g).score(frame[["a", "b"]], frame.g)
LinearRegression().fit(frame[["a"]], frame.b).predict(frame[["a"]])
RandomForestClassifier(n_estimators=2, random_state=0).fit(frame[["a", "b"]], frame.g).predict(frame[["a", "b"]])
repr(frame); print
"""


@dataclasses.dataclass(frozen=True)
class Profile:
    """One kind of zygote.

    Attributes:
      name: as `run(profile=...)` names it.
      preload: modules that are imported before the fork, so that a program's own import costs nothing.
      packages: top-level names that a program may import besides the standard library.
      distributions: their names on an index, for version queries and for error messages.
      warm_up: a program run once in the zygote, for what libraries set up at first use.
    """

    name: str
    preload: tuple[str, ...] = STDLIB
    packages: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    warm_up: tuple[str, ...] = ()

    def entries(self) -> list[str]:
        """Host paths of the packages, their bundled libraries and metadata.

        Raises:
          SandboxError: a package is not installed.
        """
        found, missing = [], []
        for package in self.packages:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                missing.append(package)
                continue
            path = os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin
            found.append(path)
        if missing and set(missing) - set(OPTIONAL):
            raise SandboxError(f"profile {self.name!r} needs {', '.join(missing)}: pip install 'marl_llm[data_science]'")
        for folder in sorted({os.path.dirname(path) for path in found}):
            for name in self.distributions:
                plain = name.replace("-", "_")
                found += glob.glob(f"{folder}/{plain}-*.dist-info") + glob.glob(f"{folder}/{plain}.libs")
        return sorted(set(found))


OPTIONAL = ("narwhals", "pytz", "tzdata")  # newer or older releases of the libraries ask for them
NUMPY = Profile("numpy", (*STDLIB, "numpy", "numpy.linalg", "numpy.random", "numpy.fft"), ("numpy",), ("numpy",))
DATA_SCIENCE = Profile(
    "data_science",
    (
        *NUMPY.preload, "pandas", "scipy.stats", "sklearn.linear_model", "sklearn.ensemble", "sklearn.tree", "sklearn.model_selection",
        "sklearn.preprocessing", "sklearn.metrics", "sklearn.pipeline", "sklearn.compose", "sklearn.impute", "sklearn.cluster",
        "sklearn.decomposition", "sklearn.neighbors", "sklearn.svm", "sklearn.naive_bayes", "sklearn.feature_extraction.text",
        "sklearn.feature_selection",
    ),
    ("numpy", "pandas", "scipy", "sklearn", "joblib", "threadpoolctl", "dateutil", "six", "narwhals", "pytz", "tzdata"),
    ("numpy", "pandas", "scipy", "scikit-learn", "joblib", "threadpoolctl", "python-dateutil", "six", "narwhals", "pytz", "tzdata"),
    (PANDAS_AND_SKLEARN,),
)  # fmt: skip
PROFILES = {profile.name: profile for profile in (Profile("bare"), NUMPY, DATA_SCIENCE)}
