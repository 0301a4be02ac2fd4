"""Examples to read and to copy from; the demo runs them."""
