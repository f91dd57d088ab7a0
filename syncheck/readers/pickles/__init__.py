"""From the bytes of a pickle to named places of tensors: nothing in it is imported or run."""
