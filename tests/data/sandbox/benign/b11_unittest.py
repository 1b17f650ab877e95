# expect-stdout: "ran 1 ok True"
# stdin: ""
# profile: bare
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(1 + 1, 2)
r = unittest.main(exit=False, argv=["x"]).result
print("ran", r.testsRun, "ok", r.wasSuccessful())
