# expect-stdout: "[[7.0, 10.0], [15.0, 22.0]] True"
# stdin: ""
# profile: numpy
import numpy as np
a = np.array([[1.0, 2.0], [3.0, 4.0]]); print((a @ a).tolist(), bool(np.allclose(np.linalg.inv(a) @ a, np.eye(2))))
