# expect: setuid programs give nothing
# check: default
import subprocess
try: r = subprocess.run(["su", "-c", "id -u"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1)
except (OSError, subprocess.TimeoutExpired): r = None
if r and r.stdout.strip() == "0": print("BREACH su")
