"""Other people's games as games of this library. Their packages are extras and are imported when such a game is made."""
