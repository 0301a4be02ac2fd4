"""Where nodes come from, and how something is started there."""
