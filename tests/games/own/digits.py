"""What lies beside a user's game."""

DIGITS = tuple("0123456789")
