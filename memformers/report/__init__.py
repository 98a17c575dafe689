"""Run folders to tables, figures and pages."""
