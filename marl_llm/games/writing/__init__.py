"""Two agents who write two texts on one post: the reward and team of MAGRPO's writing tasks, loaders, and a small world of notes."""
