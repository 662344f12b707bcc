"""Text → token windows: where documents come from, and how windows are cut from them."""
