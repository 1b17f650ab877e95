"""From the host's side to the zygote: reads its orders, raises the fence, and becomes a new interpreter behind it.

Started as `python -S -s -P -B -c "...; boot.main()"` with the orders as JSON on descriptor 0.
"""

import json
import os
import sys

from . import frames, isolation, linux

SOCKET_FD, PROC_FD = 3, 4
START = "import sys; sys.path.insert(0, {!r}); from inside import zygote; zygote.main()"
THREADS = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "BLIS")}
HOST_PATHS = ("binds", "box_executable", "box_home", "executable", "source", "scratch", "site", "readable")  # in the orders
FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8")


def environment(root: str, home: str | None, site: str | None) -> dict[str, str]:
    """All that a candidate finds in os.environ."""
    values = {
        "PATH": "/opt/python/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{root}/work",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONINTMAXSTRDIGITS": "0",  # as judges of contests have it
        "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MiB of address space
        "MPLBACKEND": "Agg",
        "LOKY_MAX_CPU_COUNT": "1",
        **THREADS,
    }
    if home:
        values |= {"PYTHONHOME": home, "LD_LIBRARY_PATH": f"{home}/lib"}  # a shared libpython is looked for where it was built
    elif "LD_LIBRARY_PATH" in os.environ:
        values["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    if site:
        values["PYTHONPATH"] = site
    if root != "/box":
        values["TMPDIR"] = f"{root}/tmp"
    return values


def without_aslr(orders: dict) -> bool:
    """Switches address randomisation off for the next exec. False where the kernel or a container refuses."""
    return linux.libc.personality(linux.ADDR_NO_RANDOMIZE) >= 0 if orders["fixed_addresses"] else False


def main() -> None:
    """Never returns."""
    orders = json.loads(frames.read_file(0))
    os.dup2(orders["socket"], SOCKET_FD)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    os.dup2(proc, PROC_FD)
    os.set_inheritable(PROC_FD, True)  # dup2 onto itself changes nothing
    os.set_inheritable(SOCKET_FD, True)
    os.closerange(PROC_FD + 1, 1 << 16)
    orders["fixed_addresses"] = without_aslr(orders)
    site = orders["site"]
    if orders["level"] == "namespaces":
        uid = isolation.enter_namespaces()
        isolation.build_root([tuple(pair) for pair in orders["binds"]], isolation.BOX_UID if uid is None else uid)
        if uid is None:
            linux.keep_capabilities_over_exec()
        root, folder = "/box", "/opt/zygote"
        executable, home = orders["box_executable"], orders["box_home"]
    else:
        uid = isolation.UID_BASE + os.getpid() if isolation.can_map_users() else None
        root, folder, executable, home = f"{orders['scratch']}/box", orders["source"], orders["executable"], None
    orders |= {"uid": uid, "root": root}
    if orders["level"] == "namespaces":  # a candidate may look into the zygote's frames: no path of the host gets that far
        for name in HOST_PATHS:
            del orders[name]
    payload = os.memfd_create("orders")
    frames.write_all(payload, json.dumps(orders).encode())
    os.dup2(payload, 0, inheritable=True)
    os.closerange(PROC_FD + 1, 1 << 16)
    sys.stdout.flush()
    # orig_argv of every candidate is set anew, so nothing of this line is seen
    os.execve(executable, [executable, *FLAGS, "-c", START.format(folder)], environment(root, home, site))
