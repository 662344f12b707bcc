"""Documents are read from many sources and cut into token windows."""
