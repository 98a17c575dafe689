"""What is in a run's folder, folders that appear whole, and reading runs back."""
