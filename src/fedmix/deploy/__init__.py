"""A federation of machines: folders with keys for server and sites, their processes, a run over them."""
