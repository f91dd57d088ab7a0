"""The reference trainer: each parallel method of PyTorch in a short file, saving one checkpoint per rank."""
