"""How many compiled programs a process holds, against what the system lets it hold.

XLA maps every program that it compiles for a CPU into the process, about twenty memory maps each, and keeps it as long as JAX caches it.
Linux allows `vm.max_map_count` maps per process (65,530 unless changed); one more ends the process in the middle of loading a program.
Shapes are bounded by buckets, so a run's programs are too; this counts what there is, and says so long before the limit.
"""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable

import jax

PROC = pathlib.Path("/proc")
WARN_AT = 0.5  # of the limit

_compiled = 0  # programs that this process compiled or loaded from the cache on disk


def _count(event: str, *_, **__) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def compiled_programs() -> int:
    """Programs that were compiled, or loaded from the cache on disk, since this module was imported."""
    return _compiled


def memory_maps() -> tuple[int, int]:
    """`(maps of this process, most that it may have)`; `(0, 0)` where the system does not say (no Linux)."""
    try:
        return (PROC / "self/maps").read_bytes().count(b"\n"), int((PROC / "sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0, 0


class ProgramWatch:
    """Counts programs and memory maps step by step, and warns once when half of what the system allows is taken.

    Args:
      say: where the warning goes.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, False

    def look(self, step: int) -> dict[str, int]:
        """The step's figures: `programs/compiled` and, where the system says, `programs/memory_maps`. About a millisecond."""
        maps, most = memory_maps()
        if most and maps >= WARN_AT * most and not self._said:
            self._said = True
            self._say(
                f"WARNING step {step}: {maps:,} of at most {most:,} memory maps are taken, by {compiled_programs():,} programs; at "
                "the limit the process dies. Make fewer shapes (larger buckets, fewer models in one process), resume in a new process, or "
                f"raise the limit: sysctl -w vm.max_map_count={4 * most}"
            )
        return {"programs/compiled": compiled_programs()} | ({"programs/memory_maps": maps} if most else {})


def free_programs() -> None:
    """Lets go of every compiled program that no Python object holds: between the runs of a sweep, a comparison or a notebook."""
    gc.collect()  # objects in cycles may hold programs
    jax.clear_caches()
    gc.collect()
