"""Power cuts, failing disks, kills and damaged files: what a run must survive."""
