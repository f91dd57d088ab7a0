"""Coverage-guided fuzzing of the readers: `python -m fuzz`. README.md beside this file says what is held."""
