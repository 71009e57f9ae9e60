"""Entry points that Flower loads: a ClientApp and a ServerApp around the same code as everywhere."""
