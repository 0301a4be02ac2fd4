"""The whole protocol in a seeded world: the pure machines of lighthouse and managers, and everything around them."""
