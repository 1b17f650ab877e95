"""A throw-away place for hostile programs: private /tmp, /dev/shm, processes and network, as root or as an ordinary user.

    python tests/tools/lab.py {root,user} SCRIPT [ARGUMENTS]

For `user`, where the tests run as root: the interpreter, its packages and this repository are shown under /mnt, because they may lie in
root's own home, and the user id becomes 65534. The weak levels of the sandbox are tried in here only: the attacks are real.
"""

import os
import pathlib
import subprocess
import sys

from marl_llm.tools.sandbox.inside import isolation, linux

NOBODY = 65534
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def enter(as_root: bool) -> dict[str, str]:
    """Namespaces for this process and its children; returns the environment that the script needs."""
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    privileged = os.geteuid() == 0 and isolation.can_map_users()
    if privileged:
        linux.unshare(flags)
    else:
        isolation.enter_user_namespace(flags)
    if os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    shown = {"python": sys.base_prefix, "site": site, "repository": str(REPOSITORY)}
    linux.mount("tmpfs", "/mnt", "tmpfs", 0, "mode=0755,size=16m")
    for name, source in shown.items():
        os.mkdir(f"/mnt/{name}")
        linux.mount(source, f"/mnt/{name}", None, linux.MS_BIND | linux.MS_REC)
    linux.mount("proc", "/proc", "proc", 0)
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        linux.mount("tmpfs", folder, "tmpfs", 0, "mode=1777,size=512m")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True)
    if privileged and not as_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    else:
        linux.libc.personality(0)
    paths = os.pathsep.join(("/mnt/repository", "/mnt/site"))
    python = {"PYTHONHOME": "/mnt/python", "LD_LIBRARY_PATH": "/mnt/python/lib"}  # a shared libpython is looked for where it was built
    return python | {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}


def main() -> None:
    """Never returns."""
    user, script, *rest = sys.argv[1:]
    path = pathlib.Path(script).resolve()
    environment = enter(user == "root")
    os.chdir("/tmp")
    executable = "/mnt/python/" + os.path.relpath(os.path.realpath(sys._base_executable), sys.base_prefix)
    seen = f"/mnt/repository/{path.relative_to(REPOSITORY)}" if path.is_relative_to(REPOSITORY) else str(path)
    os.execve(executable, [executable, seen, *rest], environment)


if __name__ == "__main__":
    main()
