"""What a verb does from end to end."""
