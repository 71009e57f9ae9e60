"""What a recipe says, and what its names mean."""
