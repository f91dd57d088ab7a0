"""One file per output format, each a pure function of the records."""
