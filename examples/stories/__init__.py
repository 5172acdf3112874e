"""Stream four stories while the model's weights change three times."""
