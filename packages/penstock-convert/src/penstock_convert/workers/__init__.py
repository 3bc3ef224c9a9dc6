"""Worker processes of conversions, and the launchers that start them."""
