"""What memory is worth on a long text, by budget and by distance."""
