"""Pages about runs, HTML and Markdown: parts of tables and pictures, which two templates draw."""
