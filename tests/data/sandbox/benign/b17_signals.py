# expect-stdout: "caught True"
# stdin: ""
# profile: bare
import os, signal, subprocess, sys
hit = []
signal.signal(signal.SIGTERM, lambda *a: hit.append(1)); os.kill(os.getpid(), signal.SIGTERM)
p = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
print("caught", bool(hit) and p.returncode == -15)
