"""A comparison to findings, verdict and baseline. Each rule is a module; the first matching rule covers its tensors."""
