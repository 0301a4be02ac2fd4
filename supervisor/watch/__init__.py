"""Watches runs from another machine: what their logs say (`digest`, `reading`), what follows from it (`machine`)."""
