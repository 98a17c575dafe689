"""Makes tables, figures and pages from the folders of runs."""
