# expect-stdout: "2.0 0.9"
# stdin: ""
# profile: ds
import numpy as np, pandas as pd
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
f = pd.DataFrame({"a": np.arange(60.0), "b": np.arange(60.0) * 2, "y": np.arange(60) > 30})
s = cross_val_score(RandomForestClassifier(10, random_state=0, n_jobs=2), f[["a"]], f.y, cv=3).mean()
print(round(float(LinearRegression().fit(f[["a"]], f.b).coef_[0]), 6), 0.9 if s > 0.5 else s)
