"""Settings of models in the configurations beside their files, and their comparison."""
