"""What is loaded before a program starts: `bare`, `numpy`, `data_science`, `reasoning_gym`."""

import dataclasses
import functools
import importlib.metadata
import re

from marl_llm.tools.sandbox.limits import SandboxError

STDLIB = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "glob", "hashlib", "heapq", "inspect", "io",
    "itertools", "json", "linecache", "locale", "math", "numbers", "operator", "os", "pickle", "pprint", "queue", "random", "re", "secrets",
    "shutil", "signal", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "traceback", "types",
    "typing", "unittest", "uuid", "warnings",
)  # fmt: skip

ARRAYS_AND_FILES = """
import io, numpy as np
table = np.genfromtxt(["a,b", "1,2.5", "2,nan", "3,4"], delimiter=",", skip_header=1)
np.loadtxt(["1,2.5", "2,3"], delimiter=",")
mean = np.nanmean(table, axis=0); table = np.where(np.isnan(table), mean, table); table = (table - table.mean(axis=0)) / table.std(axis=0)
kept = io.BytesIO(); np.save(kept, table); kept.seek(0); np.load(kept)
np.linalg.solve(table.T @ table + np.diag([1.0, 1e-6]), table.T @ np.ones(3)); np.linalg.lstsq(table, np.ones(3), rcond=None)
np.isin(table, (0, 1)).all(); np.unique(table); np.median(table); np.c_[table, np.ones(3)]; np.random.default_rng(0).normal(size=3)
repr(table); str(table); f"{table[0, 0]}"
"""
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
    """One kind of zygote."""

    name: str  # as `run(profile=...)` names it
    preload: tuple[str, ...] = STDLIB  # modules that are imported before the fork, so that a program's own import costs nothing
    distributions: tuple[str, ...] = ()  # what a program may import besides the standard library, with all that these require
    warm_up: tuple[str, ...] = ()  # programs run once in the zygote, for what libraries set up at first use
    optional: tuple[str, ...] = ()  # distributions that a program may import too where they are installed; they are not preloaded
    extra: str = "data_science"  # the extra of this library that installs the distributions

    @functools.cache  # noqa: B019 (four profiles, frozen)
    def entries(self) -> list[str]:
        """Host paths of the packages, their bundled libraries and metadata, nothing else of the folder they lie in.

        Raises:
          SandboxError: a distribution is not installed.
        """
        paths, waiting, seen = set(), [*self.distributions, *self.optional], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                if name in self.distributions:
                    raise SandboxError(f"profile {self.name!r} needs {name}: pip install 'marl_llm[{self.extra}]'") from None
                continue  # optional, or required under a condition that does not hold here, e.g. another system
            tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
            paths |= {str(distribution.locate_file(top)) for top in tops}
            needs = [line for line in distribution.requires or [] if "extra ==" not in line]
            waiting += [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in needs]
        return sorted(paths)


NUMPY = Profile("numpy", (*STDLIB, "numpy", "numpy.linalg", "numpy.random", "numpy.fft"), ("numpy",), (ARRAYS_AND_FILES,))
DATA_SCIENCE = Profile(
    "data_science",
    (
        *NUMPY.preload, "pandas", "scipy.stats", "sklearn.linear_model", "sklearn.ensemble", "sklearn.tree", "sklearn.model_selection",
        "sklearn.preprocessing", "sklearn.metrics", "sklearn.pipeline", "sklearn.compose", "sklearn.impute", "sklearn.cluster",
        "sklearn.decomposition", "sklearn.neighbors", "sklearn.svm", "sklearn.naive_bayes", "sklearn.feature_extraction.text",
        "sklearn.feature_selection",
    ),
    ("numpy", "pandas", "scikit-learn"),
    (PANDAS_AND_SKLEARN,),
    ("xgboost", "lightgbm"),
)  # fmt: skip
# For scorers of reasoning-gym that execute an answer; they need SymPy, which the package requires.
REASONING_GYM = Profile("reasoning_gym", (*NUMPY.preload, "reasoning_gym"), ("reasoning-gym",), extra="rg")
PROFILES = {profile.name: profile for profile in (Profile("bare"), NUMPY, DATA_SCIENCE, REASONING_GYM)}
