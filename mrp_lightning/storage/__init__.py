"""Read and write files so that nothing is lost: whole outputs, checksums, JSON."""
