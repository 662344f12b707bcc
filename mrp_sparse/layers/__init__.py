"""Linear layers whose weight is stored packed."""
