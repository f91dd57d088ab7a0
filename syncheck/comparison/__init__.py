"""Compare the tensors and values of replicas."""
