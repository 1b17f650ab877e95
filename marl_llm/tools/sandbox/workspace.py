"""The files that a pipeline of executions hands on, as a value.

Each execution starts with a copy of the workspace and gives a new one back, so a branch of a rollout can be played from the same files as
its siblings, a retried execution starts from what the failed one started from, and nothing is left on the host when the value is dropped.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from marl_llm.tools.sandbox.inside import snapshot
from marl_llm.untrusted import valid_text

DIGEST = "workspace_sha256"  # the key by which a record of a workspace is known


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Files, folders and links below the working folder, at most `Limits.disk_mb` of them.

    Attributes:
      data: the snapshot (format in `inside/snapshot.py`). It comes from a box: reading it checks everything.
    """

    data: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes | str]) -> "Workspace":
        """A workspace with these files; keys are relative paths.

        Raises:
          ValueError: a path that is absolute or contains '..'.
        """
        entries = [("f", path, 0o644, text.encode() if isinstance(text, str) else text) for path, text in files.items()]
        data = snapshot.dump_entries(entries)
        snapshot.load_entries(data)
        return cls(data)

    def files(self) -> dict[str, bytes]:
        """Content of the plain files by relative path; links are not followed. Names that are no UTF-8 are shown with U+FFFD.

        Raises:
          ValueError: the snapshot is damaged.
        """
        return {valid_text(path): content for kind, path, _, content in snapshot.load_entries(self.data) if kind == "f"}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the snapshot, in hexadecimal digits: equal digests mean equal files, folders, links and rights."""
        return hashlib.sha256(self.data).hexdigest()

    def sizes(self) -> dict[str, int]:
        """Bytes of each plain file, by path. A damaged snapshot has none."""
        try:
            return {path: len(content) for path, content in self.files().items()}
        except ValueError:
            return {}

    def to_json(self) -> dict[str, Any]:
        """What stands in a record in its place: digest, names and sizes."""
        return {DIGEST: self.digest, "files": self.sizes()}

    def __str__(self) -> str:
        return ", ".join(f"{path} ({size:,} bytes)" for path, size in self.sizes().items()) or "no files"
