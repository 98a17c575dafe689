"""What a trained model is worth: whole texts, effective context, attention by distance, and recall."""
