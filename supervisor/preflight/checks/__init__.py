"""One check a file; `registry` lists them."""
