"""One tensor: its name, kind and dtype, its bytes in blocks, and whether replicas are equal or how far they differ."""
