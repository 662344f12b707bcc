"""Lightning callbacks that prune."""
