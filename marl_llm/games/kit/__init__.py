"""What several games share: small worlds, tasks of data files, debates, boards. It imports no game."""
