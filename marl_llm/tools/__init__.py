"""Ground floor, reserved for what an agent may call (code sandbox, retriever, outside model). Device games need none of it."""
