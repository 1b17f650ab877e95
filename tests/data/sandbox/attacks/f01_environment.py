# expect: no environment of the host
# check: default
import os
if "MARL_SECRET_TOKEN" in os.environ or any("secret" in k.lower() for k in os.environ): print("BREACH environment")
